"""The jail of a command (`agent.container=jail`): a whole program with children, which may talk to one address alone.

    files       the system's programs and libraries, and folders that the user names, all read-only; its own folder and
                /tmp, which is in memory, are for writing
    processes   a process namespace of its own, which ends as a whole; /proc shows no others
    network     a network namespace with a loopback device. One port of it is served from outside: the socket that
                listens there is made inside and handed out
    rights      a user without capabilities that owns nothing else; no new privileges

Unlike the jail of Python code (`confine.py`) it filters no system calls: a program needs most of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_suite.sandbox import kernel
from rlhf_suite.sandbox.confine import COVERED, READ_ONLY, place_read_only
from rlhf_suite.sandbox.kernel import BIND, NO_DEV, NO_EXEC, NO_SUID, PRIVATE, RECURSIVE
from rlhf_suite.sandbox.reaper import exit_code, launch
from rlhf_suite.sandbox.template import collect

READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
DEVICES = ("null", "zero", "full", "random", "urandom")
IN_MEMORY = ("/tmp", "/dev/shm")
MEMORY_MB = 256  # of each of these
ACCOUNTS = {"passwd": "agent:x:{id}:{id}::{home}:/bin/sh\n", "group": "agent:x:{id}:\n"}
LOOPBACK, SET_FLAGS, UP = b"lo", 0x8914, 0x41  # <linux/sockios.h>, <linux/if.h>
FIRST_UID, UIDS = 1_600_000_000, 200_000_000  # users that exist nowhere: a run of root begins each episode with another


@dataclass(frozen=True)
class CommandJail:
    """What a command in the jail has: its folder, what it may read, and the port of its endpoint. `relay` is the
    descriptor of a Unix socket to which the listening socket is sent; -1: it has no network at all. `uid`: its user
    where root starts it."""

    folder: str
    readable: Sequence[str]
    uid: int
    port: int = 0
    relay: int = -1

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command of a process that runs another one in this jail."""
        return launch("command_jail", json.dumps(asdict(self)), *command)


def choose_user() -> int:
    """Return a user for the commands of an episode."""
    return FIRST_UID + secrets.randbelow(UIDS)


def run_here() -> None:
    """Enter the jail, run a command there, and end as it does."""
    jail, command = CommandJail(**json.loads(sys.argv[1])), sys.argv[2:]
    try:
        enter(jail)
    except Exception as error:
        sys.stderr.write(f"this machine offers no jail for commands: {type(error).__name__}: {error}\n")
        os._exit(1)
    child = os.fork()
    if child == 0:
        try:
            give_up_rights(jail)
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)
    while (status := wait_for(child)) is None:
        pass
    os._exit(exit_code(status))


def enter(jail: CommandJail) -> None:
    """Enter the namespaces and the root folder of a jail. The process that returns is the first of its namespace."""
    uid, gid = os.getuid(), os.getgid()
    proc = os.open("/proc", os.O_RDONLY)
    spaces = kernel.NEW_MOUNT | kernel.NEW_IPC | kernel.NEW_PID | kernel.NEW_NET | kernel.NEW_UTS
    kernel.unshare(spaces if uid == 0 else spaces | kernel.NEW_USER)
    if uid != 0:
        kernel.map_user(proc, uid, gid)
    os.close(proc)
    if jail.relay >= 0:
        with socket.socket(fileno=jail.relay) as relay, listen(jail.port) as listener:
            socket.send_fds(relay, [b"listener"], [listener.fileno()])
    if first := os.fork():
        os._exit(exit_code(os.waitpid(first, 0)[1]))
    kernel.die_with_parent()
    before = os.umask(0o022)  # the folders of the new root are for the user of the jail too
    enter_root(jail, uid == 0)
    os.umask(before)


def listen(port: int) -> socket.socket:
    """Return a socket that listens at a port of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", LOOPBACK, UP))
    return socket.create_server(("127.0.0.1", port), backlog=128)


def enter_root(jail: CommandJail, is_root: bool) -> None:
    """Build the root folder of the jail, and make it the root of this mount namespace."""
    root = COVERED
    kernel.mount(None, "/", None, RECURSIVE | PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEV, "size=1m,mode=0755")
    for folder in IN_MEMORY:
        Path(root + folder).mkdir(parents=True)
        kernel.mount("tmpfs", root + folder, "tmpfs", NO_SUID | NO_DEV, f"size={MEMORY_MB}m,mode=1777")
    shown: list[str] = []
    for path in sorted({*READABLE, *jail.readable}):
        if Path(path).exists() and not any(path.startswith(f"{other}/") for other in shown):
            place_read_only(path, Path(root + path))
            shown += [] if Path(path).is_symlink() else [path]
    for name in DEVICES:
        target = Path(root, "dev", name)
        target.touch()
        kernel.mount(f"/dev/{name}", str(target), None, BIND)
    user = jail.uid if is_root else kernel.OUTER_USER
    for name, line in ACCOUNTS.items():
        own = Path(root, f"dev/.{name}")
        own.write_text(line.format(id=user, home=f"{jail.folder}/home"), encoding="utf-8")
        with suppress(OSError):  # a machine without that file needs none
            kernel.mount(str(own), f"{root}/etc/{name}", None, BIND)
    if is_root:
        give_to(jail.folder, jail.uid)
    inside = Path(root + jail.folder)
    inside.mkdir(parents=True, exist_ok=True)
    kernel.mount(jail.folder, str(inside), None, BIND)
    kernel.seal(str(inside), kernel.SEAL_NO_SUID | kernel.SEAL_NO_DEV)
    Path(root, "proc").mkdir(exist_ok=True)
    kernel.mount("proc", f"{root}/proc", "proc", NO_SUID | NO_DEV | NO_EXEC)
    kernel.seal(root, READ_ONLY)
    working = Path.cwd()
    kernel.enter_root(root)
    os.chdir(working if working.is_dir() else jail.folder)


def give_to(folder: str, uid: int) -> None:
    """Make a user the owner of a folder and of all that is in it."""
    os.chown(folder, uid, uid)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(Path(place, name), uid, uid, follow_symlinks=False)


def give_up_rights(jail: CommandJail) -> None:
    """Become the user of the jail, without capabilities."""
    if os.getuid() == 0:
        kernel.drop_bounding_set()
        kernel.become(jail.uid)
    kernel.die_with_parent()
    kernel.new_keyring()
    kernel.prctl(kernel.NO_NEW_PRIVILEGES, 1)
    kernel.drop_capabilities()


def wait_for(child: int) -> int | None:
    """Wait until a process below this one has ended, and return the status of `child` once it has."""
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    return collect(child)
