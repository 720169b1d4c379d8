"""Run one untrusted Python program in this process, after giving up every right that the program must not have.

`python -I jail.py <payload fd> <report fd>` is started by `programs.SandboxedProcess` in an empty folder. The payload
is JSON: the code, a secret that is written to the report when all of the code has run, and the limits. This file
imports nothing of the suite: it starts fast, and the program can reach nothing of the suite. The program can reach the
report, so the report proves only that the code ran to its end.

What is given up, and how:

    network                 a network namespace of its own (root, or where users may make user namespaces); where there
                            is none, Landlock refuses TCP (Linux 6.7)
    other processes         a process namespace of its own, which ends as a whole; 32 processes and threads at most;
                            where there is none, Landlock refuses signals to others (Linux 6.12)
    files                   Landlock: reading the interpreter's and the system's libraries, writing its own folder
    disk                    its folder is in memory, of 64 MiB (with namespaces)
    root                    the user nobody
    memory, CPU, file size  resource limits
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import sysconfig
from pathlib import Path

NOBODY = 65534
MAX_TASKS = 32  # processes and threads
FILE_BYTES = 8 << 20  # the size of any file that the program writes, its output included
DISK = b"size=64m,nr_inodes=4096,mode=0700"
NEW_MOUNTS, RECURSIVE_PRIVATE, NO_SUID_NO_DEVICES = 0x00020000, 1 << 14 | 1 << 18, 2 | 4
NEW_USER, NEW_NET, NEW_PID, NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
NO_NEW_PRIVILEGES, DEATH_SIGNAL, KEEP_CAPABILITIES = 38, 1, 8
CAPABILITY_VERSION, READ_SEARCH = 0x20080522, 1 << 2
# Landlock (x86-64 and arm64 have the same numbers): access rights by the version of the interface that added them.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
TCP, TCP_SINCE = 1 | 2, 4  # bind and connect; the version of the interface that added them
SCOPES, SCOPES_SINCE = 1 | 2, 6  # abstract sockets of, and signals to, processes outside
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14  # rights that apply to a file rather than to a folder
READ = EXECUTE | READ_FILE | READ_DIR
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")
libc = ctypes.CDLL(None, use_errno=True)


class Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def main(payload_fd: int, report_fd: int) -> None:
    """Read the payload, isolate this process, run the program, and write the secret to the report."""
    with os.fdopen(payload_fd) as file:
        payload = json.load(file)
    shut = isolate()
    limit(payload["memory_bytes"], payload["cpu_s"], counted_alone=shut)
    landlock(Path.cwd())
    os.environ.clear()
    os.environ.update(LANG="C.UTF-8", HOME=str(Path.cwd()), TMPDIR=str(Path.cwd()), OMP_NUM_THREADS="1")
    names: dict[str, object] = {"__name__": "__main__"}
    sys.argv = ["program.py"]
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    exec(compile(payload["code"], "program.py", "exec"), names)
    os.write(report_fd, payload["secret"].encode())


def isolate() -> bool:
    """Enter new namespaces and give up root. Return whether our processes are counted apart from the user's others."""
    is_root = os.geteuid() == 0
    spaces = NEW_NET | NEW_PID | NEW_IPC
    uid, gid = os.getuid(), os.getgid()
    parted = libc.unshare(spaces if is_root else spaces | NEW_USER) == 0
    if parted and not is_root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")
    if parted:
        own_disk(Path.cwd())
    if parted and (first := os.fork()):  # the process namespace begins with the next process
        _, status = os.waitpid(first, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)  # a shell reports a signal in this way
    if is_root:
        become_nobody()
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    return is_root or parted


def own_disk(folder: Path) -> None:
    """Mount a small file system in memory over `folder`. No other process sees it."""
    if libc.unshare(NEW_MOUNTS) == 0 and libc.mount(None, b"/", None, RECURSIVE_PRIVATE, None) == 0:
        libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", NO_SUID_NO_DEVICES, DISK)
        os.chdir(folder)


def become_nobody() -> None:
    """Give up root. If only root can enter the interpreter's folder, keep the right to read, which Landlock
    restricts.
    """
    os.chown(".", NOBODY, NOBODY)
    hidden = any(not parent.stat().st_mode & 1 for parent in Path(sys.base_prefix, "lib").resolve().parents)
    keeps = hidden and libc.syscall(CREATE_RULESET, None, 0, 1) >= 1
    libc.prctl(KEEP_CAPABILITIES, int(keeps), 0, 0, 0)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    if keeps:
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
        sets = (ctypes.c_uint32 * 6)(READ_SEARCH, READ_SEARCH, 0, 0, 0, 0)  # effective, permitted, inheritable; twice
        libc.capset(header, sets)


def limit(memory_bytes: int, cpu_s: int, counted_alone: bool) -> None:
    """Set resource limits. Where the user's other processes are counted too, the program may start none at all."""
    tasks = MAX_TASKS if counted_alone else 0
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NPROC, tasks),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def landlock(folder: Path | None) -> bool:
    """Allow only reading libraries and writing `folder`; deny TCP and signals. Return False where there is no Landlock.

    Without root, NO_NEW_PRIVILEGES must be set before.
    """
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    handled = RIGHTS[min(version, max(RIGHTS))]
    rules = Ruleset(handled, TCP if version >= TCP_SINCE else 0, SCOPES if version >= SCOPES_SINCE else 0)
    # An older kernel accepts a longer structure if the fields that it does not know are 0.
    ruleset = libc.syscall(CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    prefixes = (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *filter(os.path.isabs, sys.path))
    for path in {*READABLE, *prefixes}:
        allow(ruleset, Path(path), READ)
    allow(ruleset, Path("/dev/null"), READ_FILE | WRITE_FILE)
    if folder is not None:
        allow(ruleset, folder, handled)
    done = libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return done


def allow(ruleset: int, path: Path, rights: int) -> None:
    """Add a rule that gives `rights` on `path`, if the path exists."""
    try:
        fd = os.open(path, os.O_PATH)
    except OSError:
        return
    rule = PathRule(rights if path.is_dir() else rights & OF_FILES, fd)
    libc.syscall(ADD_RULE, ruleset, 1, ctypes.byref(rule), 0)
    os.close(fd)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
