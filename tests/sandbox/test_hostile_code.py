"""Attacks from inside the jail: none reaches its aim, and the same code does reach it in a plain process."""

from __future__ import annotations

import os
import re

import jail_attacks
import pytest
from jail_attacks import ATTACKS, BY_USER, LINE_S, LINES, MEMORY_MB, NOT_STOPPED, WAYS

from attack_page import Section

PROTECTED = [way for way in WAYS if way != "no jail" and (os.geteuid() == 0 or way in BY_USER)]
SECTION = Section(
    "## What code can try inside the jail",
    f"The attacks of `tests/sandbox/hostile.py`, each in a session of {MEMORY_MB} MiB, with the seconds from its "
    "start to its end. The weaker jail is the one that `reward.rules.code_allow_weaker=true` accepts where a "
    "machine refuses namespaces. The column before the last shows which attacks reach their aims in a plain "
    "process; those that would disturb the machine were not tried. The last attacks are on the line between a "
    f"session and the suite: each must end within its limit of {LINE_S:g} s, with a reason, and without effect on "
    "another session.",
    ("attack", *PROTECTED, "no jail", "what was seen in the jail"),
)
# These reach their aims where nothing stops them, for every user and on every kernel; others depend on both.
ALWAYS_POSSIBLE = {
    *("unix_socket_of_the_user", "unix_socket_of_everybody", "abstract_unix_socket", "datagram_from_a_socket_pair"),
    *("tcp_to_this_machine", "udp_to_this_machine", "netlink_socket", "change_a_mode", "change_times"),
    *("make_a_hard_link", "ask_whether_a_file_exists", "read_a_file_of_the_user", "list_a_folder_of_the_user"),
    *("read_the_list_of_users", "list_sys", "write_outside", "read_an_environment", "list_processes"),
    *("signal_a_process", "limit_a_process", "slow_down_a_process", "be_traced", "outlive_the_session"),
    "escape_codes_in_the_output",
}


@pytest.fixture(scope="module")
def inside():
    return {one.attack: one for one in jail_attacks.attempts(bare=False)}


@pytest.mark.notices(
    "code in the jail may make files in memory", "sandbox/seccomp.py", '"memfd_create": (319, 279), ', ""
)
@pytest.mark.notices(
    "code in the jail may handle page faults",
    "sandbox/seccomp.py",
    ', "userfaultfd": (323, 282)',
    "",
    cases="userfaultfd",
)
@pytest.mark.notices(
    "a child of the code may enter new namespaces",
    "sandbox/seccomp.py",
    "on_call(CLONE, load_argument(0), no_new_spaces, only_threads, allow)",
    "on_call(CLONE, load_argument(0), only_threads, allow)",
    cases="child_in_a_user_namespace",
)
@pytest.mark.notices(
    "the folder of a session has no limit",
    "sandbox/confine.py",
    'f"size={session.disk_mb}m,',
    'f"size=4000m,',
    cases="full_disk",
)
@pytest.mark.notices(
    "shared memory without a file is allowed in the jail",
    "sandbox/seccomp.py",
    "refuse, shared, allow),",
    "refuse, allow),",
    cases="shared_pages or shared_memory or unix_socket_of_the_user",
)
@pytest.mark.notices(
    "the jail has /dev/zero",
    "sandbox/confine.py",
    'DEVICES = ("null", "urandom")',
    'DEVICES = ("null", "urandom", "zero")',
    cases="shared_pages",
)
@pytest.mark.notices(
    "code in the jail may ask for the locks of other sessions",
    "sandbox/seccomp.py",
    "FCNTL_REFUSED = (5, 36, ",
    "FCNTL_REFUSED = (",
    cases="message_in_a_lock",
)
@pytest.mark.notices(
    "code in the jail may watch the files of the machine",
    "sandbox/seccomp.py",
    '"inotify_init1": (294, 26), ',
    "",
    cases="watches_of_files",
)
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_does_not_reach_its_aim(inside, attack):
    assert inside[attack].stopped, inside[attack]


@pytest.mark.notices(
    "a reply to another call counts", "sandbox/session.py", ' or value["id"] != self.calls', "", cases="another"
)
@pytest.mark.parametrize("attack", LINES)
def test_an_attack_on_the_line_ends_with_a_reason_and_disturbs_no_other_session(attack):
    (one,) = jail_attacks.attempts_on_line(False, [attack])
    assert one.stopped, one


def test_the_same_code_reaches_its_aims_where_there_is_no_jail():
    found = {one.attack for one in jail_attacks.attempts_without_jail(sorted(ALWAYS_POSSIBLE)) if not one.stopped}
    assert found == ALWAYS_POSSIBLE


@pytest.fixture(scope="module")
def found(section):
    """What came of each attack, as root and as an ordinary user, in both jails and in none."""
    found = {way: jail_attacks.results_of(WAYS[way]) for way in [*PROTECTED, "no jail"]}
    for name in [*ATTACKS, *LINES]:
        seen = found["ordinary user"][name].outcome.removeprefix("stopped").lstrip(": ")
        seen = re.sub(r"\[Errno \d+\] |: '/.*|; the session has ended", "", seen)
        cells = [cell(results.get(name)) for results in found.values()]
        section.add(name.replace("_", " "), *cells, seen or "nothing was reached")
    return found


def cell(one):
    """Return what the table says of an attack."""
    if one is None:
        return "-"
    return f"{'stopped' if one.stopped else '**got through**'}, {one.seconds:.2f} s"


@pytest.mark.proof
@pytest.mark.parametrize("way", PROTECTED)
def test_every_user_has_the_same_protection(found, way):
    """Root becomes a user; without namespaces only questions whether files exist are answered."""
    assert {one.user for one in found[way].values()} == {"root" if way.startswith("root") else "user"}
    assert {name for name, one in found[way].items() if not one.stopped} == NOT_STOPPED[kind(way)]
    assert [*found[way]] == [*ATTACKS, *LINES]


def kind(way):
    return "bare" if "weaker" in way else "spaces"
