"""Attacks on the jail from inside it (`hostile.py`): one JSON line per attack.

    python tests/sandbox/jail_attacks.py                 # the jail that this machine offers
    python tests/sandbox/jail_attacks.py --bare          # the weaker one, without namespaces
    python tests/sandbox/jail_attacks.py --as_user       # root only: as an ordinary user, here number 54321
    python tests/sandbox/jail_attacks.py --no_jail       # those that do no harm, in a plain process: what they can do

As root, the whole script runs in a mount namespace of its own, in which others may reach Python: where it is installed
below a folder of mode 0700 (such as /root), this folder is replaced by one that holds only Python. `--as_user` then
becomes that user. Every run begins with the probe of `sandbox/jail.py`, which says whether code runs inside at all: a
jail in which nothing runs would stop every attack.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf_suite.sandbox import kernel
from rlhf_suite.sandbox.jail import jail_options, offer, trial_problem
from rlhf_suite.sandbox.process import Resources, Template
from rlhf_suite.sandbox.session import CallResult, Session

TEXT = "\n".join(Path(__file__).with_name(name).read_text() for name in ("hostile.py", "hostile_memory.py"))
# Helpers of the attacks have arguments; `attempt` does too.
ATTACKS = [each.name for each in ast.parse(TEXT).body if isinstance(each, ast.FunctionDef) and not each.args.args]
MEMORY_MB, DISK_MB, CALL_S = 512, 64, 15.0
ORDINARY_USER = 54321
WAYS: dict[str, tuple[str, ...]] = {
    "root": (),
    "ordinary user": ("--as_user",),
    "root, weaker jail": ("--bare",),
    "ordinary user, weaker jail": ("--bare", "--as_user"),
    "no jail": ("--no_jail", "--as_user"),
}
BY_USER = ("ordinary user", "ordinary user, weaker jail", "no jail")
ADD_KEY = (248, 217)
# These would disturb the machine if nothing stopped them.
HARMFUL = {
    *("shared_segments", "files_in_memory", "full_disk", "children_with_memory", "children_that_hide_their_memory"),
    *("shared_memory_of_children", "shared_memory", "fork_bomb", "thread_bomb", "write_into_the_library"),
    *("shared_pages_that_are_unmapped", "shared_pages_of_a_device", "shared_pages_that_are_validated"),
    *("shared_pages_that_are_not_needed", "huge_pages_of_the_machine", "files_that_are_deleted"),
    *("children_without_a_first_thread", "full_sockets", "many_mappings", "many_file_locks", "deep_folders"),
    *("flush_all_disks", "drop_the_library_from_memory", "interrupt_the_guard"),
}
# On the line of a session: descriptor 3 has its requests, 4 takes its replies. What is said of each is how it must end.
OUTLIVED, LOST, KILLED, BROKEN = "the session lives on", "it ended early", "it ran longer", "it broke the protocol"
LINES = {
    "a frame of 4 GB": ("os.write(4, b'\\xff' * 4)", BROKEN),
    "a reply that is not JSON": ("os.write(4, b'\\0\\0\\0\\1x')", BROKEN),
    "a reply of 100,000 lists in one another": ("os.write(4, (100000).to_bytes(4, 'big') + b'[' * 100000)", BROKEN),
    "an integer of 100,000 digits": ("os.write(4, (100000).to_bytes(4, 'big') + b'9' * 100000)", BROKEN),
    "a reply that lacks fields": ("os.write(4, (8).to_bytes(4, 'big') + b'{\"id\":1}')", BROKEN),
    "the reply to another call": (
        'frame = b\'{"id": 9, "value": null, "problem": null, "timed_out": false}\'\n'
        "os.write(4, len(frame).to_bytes(4, 'big') + frame)\ntime.sleep(1000)",
        BROKEN,
    ),
    "two replies": ("frame = b'[]'\nos.write(4, (len(frame).to_bytes(4, 'big') + frame) * 2)", BROKEN),
    "half a reply": ("os.write(4, b'\\0\\0\\1\\0')\ntime.sleep(1000)", (BROKEN, KILLED)),
    "a closed line": ("os.close(4)", LOST),
    "every descriptor closed, then sleep": ("os.closerange(0, 64)\ntime.sleep(1000)", (LOST, KILLED)),
    "endless output": ("while True: print('x' * 100000)", ("it printed too much", KILLED)),
    "the alarm ignored": ("signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass", KILLED),
    "every exception caught": ("while True:\n try:\n  time.sleep(1000)\n except BaseException: pass", KILLED),
    "its own end": ("os._exit(0)", LOST),
    "a segmentation fault": ("ctypes.string_at(0)", "it was ended by SIGSEGV"),
    "endless recursion": ("def f(): f()\nf()", OUTLIVED),
    "a signal to every process": ("os.kill(-1, 9)", OUTLIVED),
    "its own stop": ("os.kill(os.getpid(), signal.SIGSTOP)", KILLED),
    "a child that goes on": ("os.fork()", OUTLIVED),
    "a thread that prints later": (
        "threading.Thread(target=lambda: [time.sleep(0.2), print('late')]).start()",
        OUTLIVED,
    ),
}
LINE_S = 2.0
# What a jail cannot stop, by its kind; docs/rewards_code.md says so.
NOT_STOPPED = {"spaces": set[str](), "bare": {"ask_whether_a_file_exists"}}


@dataclass(frozen=True)
class Attempt:
    """What came of one attack."""

    jail: str
    user: str
    attack: str
    stopped: bool
    outcome: str
    seconds: float


@contextmanager
def targets() -> Iterator[dict[str, Any]]:
    """Yield what attacks aim at, all of it our own."""
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attacked_")))
        public = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attacked_", dir="/dev/shm")))
        public.chmod(0o777)
        (private / "secret").write_text("secret")
        (private / "secret").chmod(0o600)
        (public / "visible").write_text("visible")
        name = f"attacked{os.getpid()}"
        victim = stack.enter_context(subprocess.Popen(["sleep", "3600"], env={"SECRET": "x"}))
        stack.callback(victim.kill)
        kernel.syscall(*ADD_KEY, b"user", name.encode(), b"secret key", 10, ctypes.c_long(-3))
        yield {
            "socket_0600": listen(stack, socket.AF_UNIX, str(public / "a"), 0o600),
            "socket_0777": listen(stack, socket.AF_UNIX, str(public / "b"), 0o777),
            "datagram": listen(stack, socket.AF_UNIX, str(public / "c"), 0o777, socket.SOCK_DGRAM),
            "abstract": listen(stack, socket.AF_UNIX, f"\0{name}")[1:],
            "tcp": listen(stack, socket.AF_INET, ("127.0.0.1", 0))[1],
            "udp": listen(stack, socket.AF_INET, ("127.0.0.1", 0), kind=socket.SOCK_DGRAM)[1],
            "file": str(private / "secret"),
            "visible": str(public / "visible"),
            "write": str(public / "written"),
            "victim": victim.pid,
            "key": name,
            "segments": 0x6A61 + os.getpid(),
            "daemon": name[-15:],
        }


def listen(stack: ExitStack, family: int, address: Any, mode: int = 0, kind: int = socket.SOCK_STREAM) -> Any:
    """Open a socket that waits for connections or messages; return its address."""
    one = stack.enter_context(socket.socket(family, kind))
    one.bind(address)
    if kind == socket.SOCK_STREAM:
        one.listen()
    if mode:
        Path(address).chmod(mode)
    return one.getsockname().decode() if isinstance(one.getsockname(), bytes) else one.getsockname()


def attempts(bare: bool, names: Iterable[str] = ATTACKS) -> Iterator[Attempt]:
    """Run attacks, each in a session of its own.

    Raises:
        RuntimeError: code does not run in such a jail here, or the jail is not the one that is meant.
    """
    options = jail_options(bare=True) if bare else offer().options
    problem = "the machine offers none" if options is None or options.bare != bare else trial_problem(options)
    if problem is not None or options is None:
        raise RuntimeError(f"{'the jail without namespaces' if bare else 'the jail'} does not work here: {problem}")
    template = Template(options)
    template.wait_ready()
    with targets() as aims:
        aims["bare"] = bare
        for name in names:
            began = time.perf_counter()
            with Session(template, Resources(MEMORY_MB, DISK_MB)) as session:
                result = session.run(f"T = {aims!r}\n{TEXT}\nattempt({name!r})", CALL_S)
            seconds = round(time.perf_counter() - began, 2)
            outcome = what_came_of(result, aims)
            who = "root" if os.geteuid() == 0 else "user"
            stopped = not outcome.startswith("GOT THROUGH")
            yield Attempt("bare" if bare else "spaces", who, name, stopped, outcome, seconds)
    template.close()


def attempts_on_line(bare: bool, names: Iterable[str] = tuple(LINES)) -> Iterator[Attempt]:
    """Attack the line of a session; a second session must not notice."""
    options = jail_options(bare=True) if bare else offer().options
    assert options is not None
    template = Template(options)
    template.wait_ready()
    with Session(template) as neighbour:
        neighbour.run("x = 1")
        for name in names:
            code, expected = LINES[name]
            began = time.perf_counter()
            with Session(template, Resources(MEMORY_MB, DISK_MB)) as session:
                session.run("import ctypes, os, signal, threading, time")
                result = session.run(code, LINE_S)
                outcome = OUTLIVED if not result.state_lost else str(result.problem)
            seconds = round(time.perf_counter() - began, 2)
            stopped = outcome.startswith(expected) and neighbour.run("x").value == "1"
            who = "root" if os.geteuid() == 0 else "user"
            yield Attempt("bare" if bare else "spaces", who, name, stopped, outcome, seconds)
    template.close()


def attempts_without_jail(names: Iterable[str] = ATTACKS) -> Iterator[Attempt]:
    """Run those attacks in plain processes that do no harm, to see what each of them can do."""
    with targets() as aims:
        for name in (each for each in names if each not in HARMFUL):
            code = f"T = {aims!r}\n{TEXT}\nprint(attempt({name!r}))"
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    [sys.executable, "-I", "-c", code],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                )
            result = CallResult(
                done.stdout.decode(), (done.stdout.decode().strip().splitlines() or [""])[-1], "it died"
            )
            seconds = round(time.perf_counter() - began, 2)
            outcome = what_came_of(result, aims)
            who = "root" if os.geteuid() == 0 else "user"
            yield Attempt("none", who, name, not outcome.startswith("GOT THROUGH"), outcome, seconds)


def what_came_of(result: CallResult, aims: dict[str, Any]) -> str:
    """Return what an attack reached, also by what it left behind."""
    left = [*left_behind(aims), *(["escape codes"] if "\033" in result.output else [])]
    if left:
        return f"GOT THROUGH: {', '.join(left)}"
    if result.value is None:
        return f"stopped: {(result.problem or '').splitlines()[-1]}"
    return result.value.strip("'\"")


def left_behind(aims: dict[str, Any]) -> Iterator[str]:
    """Yield what an attack left behind, and remove it."""
    deadline = time.monotonic() + 1.0  # for processes that are being killed
    while (alive := named(aims["daemon"])) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in alive:
        yield "a process lives on"
        os.kill(pid, signal.SIGKILL)
    for number in range(12):
        if (segment := kernel.libc.shmget(aims["segments"] + number, 0, 0)) >= 0:
            yield "shared memory lives on"
            kernel.libc.shmctl(segment, 0, None)
    if Path(aims["write"]).exists():
        yield "a file was written"
        Path(aims["write"]).unlink()


def named(name: str) -> list[int]:
    """Return the processes of this name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            state = path.with_name("stat").read_text().rpartition(") ")[2][0]
            if path.read_text().strip() == name and state != "Z":
                found.append(int(path.parent.name))
    return found


def show_python_to_others() -> None:
    """Let other users reach Python, in a mount namespace of this process alone; root only."""
    hidden = [each for each in Path(sys.base_prefix).parents if not each.stat().st_mode & 1]
    kernel.unshare(kernel.NEW_MOUNT)
    kernel.mount(None, "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    for folder in hidden[-1:]:
        inner = next(each for each in (Path(sys.base_prefix), *Path(sys.base_prefix).parents) if each.parent == folder)
        with tempfile.TemporaryDirectory() as aside:
            kernel.mount(str(inner), aside, None, kernel.BIND | kernel.RECURSIVE)
            kernel.mount("tmpfs", str(folder), "tmpfs", 0, "mode=0755")
            inner.mkdir()
            kernel.mount(aside, str(inner), None, kernel.BIND | kernel.RECURSIVE)
            kernel.check(kernel.libc.umount2(aside.encode(), 2), "umount2")


def results_of(options: tuple[str, ...]) -> dict[str, Attempt]:
    """Run this script with other options; return what came of each attack."""
    command = [sys.executable, __file__, *(each for each in options if os.geteuid() == 0 or each != "--as_user")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return {one.attack: one for one in (Attempt(**json.loads(line)) for line in done.stdout.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bare", action="store_true", help="the weaker jail, without namespaces")
    parser.add_argument("--as_user", action="store_true", help="root only: become an ordinary user first")
    parser.add_argument("--no_jail", action="store_true", help="in plain processes")
    parser.add_argument("attacks", nargs="*", help="names of attacks; all without one")
    given = parser.parse_args()
    if os.geteuid() == 0:
        show_python_to_others()
        if given.as_user:
            os.environ["HOME"] = "/"
            kernel.become(ORDINARY_USER)
            kernel.prctl(kernel.DUMPABLE, 1)
    names = given.attacks or [*ATTACKS, *LINES]
    inside, on_line = [name for name in names if name in ATTACKS], [name for name in names if name in LINES]
    everything = chain(attempts(given.bare, inside), attempts_on_line(given.bare, on_line))
    failed = 0
    for one in attempts_without_jail(inside) if given.no_jail else everything:
        print(json.dumps(asdict(one)), flush=True)
        failed += not one.stopped and one.attack not in NOT_STOPPED.get(one.jail, ATTACKS)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
