"""Calls of the Linux kernel for which Python has no function: namespaces, mounts, rights, Landlock.

Numbers are those of x86-64 and arm64, which share all from 424 on. This file imports nothing of the suite: it is loaded
by the processes of the jail.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
IS_ARM = os.uname().machine == "aarch64"
NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
BIND, RECURSIVE, PRIVATE, NO_SUID, NO_DEV, NO_EXEC = 1 << 12, 1 << 14, 1 << 18, 2, 4, 8  # flags of mount
SEAL_READ_ONLY, SEAL_NO_SUID, SEAL_NO_DEV, SEAL_NO_EXEC = 1, 2, 4, 8  # attributes of mount_setattr
# Options of prctl.
DEATH_SIGNAL, DUMPABLE, DROP_BOUND, SUBREAPER, NO_NEW_PRIVILEGES, AMBIENT, CLEAR_AMBIENT = 1, 4, 24, 36, 38, 47, 4
CAPABILITY_VERSION, MAX_CAPABILITY = 0x20080522, 64
JOIN_NEW_KEYRING = 1
# Landlock: rights on files by the version of the interface, and the versions that added TCP, and signals and abstract
# sockets.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
FILE_RIGHTS = {0: 0, 1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
TCP_SINCE, SCOPES_SINCE = 4, 6
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15  # rights on a file rather than on a folder
READ = EXECUTE | READ_FILE | READ_DIR
OUTER_USER = 65534  # the name of the only user inside a user namespace


def check(result: int, action: str) -> int:
    """Return the result of a call; raise OSError, with `action` in its message, if the call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")
    return result


def syscall(x86: int, arm: int, *args: object) -> int:
    """Call the kernel by number; the result is negative if it failed."""
    return int(libc.syscall(arm if IS_ARM else x86, *args))


def unshare(spaces: int) -> None:
    """Enter new namespaces."""
    check(libc.unshare(spaces), "unshare")


def map_user(proc: int, uid: int, gid: int) -> None:
    """Make user `uid` the only user of this new user namespace. `proc` is a descriptor of the machine's /proc."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{OUTER_USER} {uid} 1"),
        ("gid_map", f"{OUTER_USER} {gid} 1"),
    ):
        fd = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system."""
    parts = [part.encode() if part is not None else None for part in (source, target, kind, options)]
    check(libc.mount(parts[0], parts[1], parts[2], flags, parts[3]), f"mount {target}")


def seal(target: str, attributes: int, recursive: bool = False) -> None:
    """Set attributes of a mount, such as read-only, with `recursive` also of the mounts below it (Linux 5.12)."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    result = syscall(442, 442, -100, target.encode(), 0x8000 if recursive else 0, wanted, len(wanted))
    check(result, f"mount_setattr {target}")


def enter_root(folder: str) -> None:
    """Make `folder` the root; the old root is gone."""
    os.chdir(folder)
    check(syscall(155, 41, b".", b"."), "pivot_root")
    check(libc.umount2(b".", 2), "umount2")
    os.chdir("/")


def limit(kind: int, soft: int, hard: int) -> None:
    """Set a resource limit of this process, both parts no higher than the hard limit that it has: only root may raise
    that one."""
    _, most = resource.getrlimit(kind)
    bounded = [min(value, most) if most != resource.RLIM_INFINITY else value for value in (soft, hard)]
    resource.setrlimit(kind, (bounded[0], bounded[1]))


def prctl(option: int, value: int) -> int:
    """Set a property of this process."""
    return int(libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. A change of user undoes that, so call it after one."""
    check(prctl(DEATH_SIGNAL, 9), "prctl")


def drop_bounding_set() -> None:
    """Give up every capability that a later program could bring."""
    for number in range(MAX_CAPABILITY):
        prctl(DROP_BOUND, number)


def drop_capabilities() -> None:
    """Give up all capabilities of this process."""
    prctl(AMBIENT, CLEAR_AMBIENT)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, sets), "capset")


def become(uid: int) -> None:
    """Become a user and group without further groups, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def new_keyring() -> None:
    """Leave the session keyring, which may hold secrets, for an empty one."""
    syscall(250, 219, JOIN_NEW_KEYRING, None)


def landlock_version() -> int:
    """Return the version of Landlock's interface, 0 where there is none."""
    return max(int(libc.syscall(CREATE_RULESET, None, 0, 1)), 0)


def landlock(readable: Iterable[str], writable: str | None) -> int:
    """Deny all files but these, TCP (version 4), and signals and abstract sockets to processes outside (version 6).

    Without root, NO_NEW_PRIVILEGES must be set before. Return the version, 0 where there is no Landlock.
    """
    version = landlock_version()
    if version == 0:
        return 0
    rights = FILE_RIGHTS[max(known for known in FILE_RIGHTS if known <= version)]
    # An older kernel takes a longer structure whose unknown fields are 0.
    rules = struct.pack("=QQQ", rights, 3 * (version >= TCP_SINCE), 3 * (version >= SCOPES_SINCE))
    ruleset = check(int(libc.syscall(CREATE_RULESET, rules, len(rules), 0)), "landlock_create_ruleset")
    allowed = [(path, READ) for path in readable] + [("/dev/null", READ_FILE | WRITE_FILE)]
    for path, wanted in [*allowed, *([(writable, rights)] if writable is not None else [])]:
        with suppress(OSError):  # a path that is not there needs no rule
            fd = os.open(path, os.O_PATH)
            granted = wanted & rights if Path(path).is_dir() else wanted & rights & OF_FILES
            libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", granted, fd), 0)
            os.close(fd)
    check(int(libc.syscall(RESTRICT_SELF, ruleset, 0)), "landlock_restrict_self")
    os.close(ruleset)
    return version
