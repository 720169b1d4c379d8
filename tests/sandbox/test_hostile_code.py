"""Attacks from inside the jail: none reaches its aim, and the same code does reach it in a plain process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import jail_attacks  # noqa: E402

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
@pytest.mark.parametrize("attack", jail_attacks.ATTACKS)
def test_an_attack_does_not_reach_its_aim(inside, attack):
    assert inside[attack].stopped, inside[attack]


@pytest.mark.notices(
    "a reply to another call counts", "sandbox/session.py", ' or found["id"] != self.calls', "", cases="another"
)
@pytest.mark.parametrize("attack", jail_attacks.LINES)
def test_an_attack_on_the_line_ends_with_a_reason_and_disturbs_no_other_session(attack):
    (one,) = jail_attacks.attempts_on_line(False, [attack])
    assert one.stopped, one


def test_the_same_code_reaches_its_aims_where_there_is_no_jail():
    found = {one.attack for one in jail_attacks.attempts_without_jail(sorted(ALWAYS_POSSIBLE)) if not one.stopped}
    assert found == ALWAYS_POSSIBLE


@pytest.mark.proof
@pytest.mark.parametrize("options", [[], ["--bare"]], ids=["full", "bare"])
def test_an_ordinary_user_has_the_same_protection(options):
    """Root becomes a user; without namespaces only questions whether files exist are answered."""
    as_user = ["--as_user"] if os.geteuid() == 0 else []
    command = [sys.executable, str(BENCHMARKS / "jail_attacks.py"), *options, *as_user]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["user"] for one in found} == {"user"}
    through = {one["attack"] for one in found if not one["stopped"]}
    assert through == jail_attacks.NOT_STOPPED["bare" if options else "spaces"]
    assert len(found) == len(jail_attacks.ATTACKS) + len(jail_attacks.LINES)
