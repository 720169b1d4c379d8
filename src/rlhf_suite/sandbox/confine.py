"""What a process of the jail gives up before untrusted code runs in it: files, rights, resources.

    files             a root folder with the interpreter, its packages and the system's libraries, all read-only; the
                      only folder for writing is in memory. Landlock says the same a second time
    processes         a process namespace of its own, which ends as a whole
    network           a network namespace without devices; seccomp refuses sockets
    rights            a user without capabilities, alone in its user namespace; no new privileges
    kernel            seccomp refuses what Python code does not need (`seccomp.py`)
    memory, CPU, ...  resource limits, and a watcher outside (`memory.py`)

Without namespaces (a bare jail) the rest holds, seccomp refuses more, and there are no other processes at all. This
file imports nothing of the suite but `kernel` and `seccomp`.
"""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.sandbox import kernel, seccomp
from rlhf_suite.sandbox.kernel import BIND, NO_DEV, NO_EXEC, NO_SUID, PRIVATE, RECURSIVE

FOLDER = "/box"  # where untrusted code may write, with namespaces
COVERED = "/sys"  # where the small root is mounted at first: a folder that is everywhere, and that nobody needs inside
MAX_TASKS = 16  # processes and threads
MAX_FILES = 64
FILE_BYTES = 64 << 20
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("null", "urandom")  # a shared mapping of /dev/zero is memory that no limit counts
READ_ONLY = kernel.SEAL_READ_ONLY | kernel.SEAL_NO_SUID | kernel.SEAL_NO_DEV
COUNTED_BY_NAMESPACE = (5, 14)  # the first Linux that counts a user's processes apart in each user namespace


@dataclass(frozen=True)
class JailOptions:
    """How a template and its sessions are confined. Where root starts them, they are user `uid` and the next."""

    bare: bool
    user_spaces: bool  # root only: whether sessions have user namespaces; users always have them
    root: bool
    uid: int
    imports: tuple[str, ...]


@dataclass(frozen=True)
class SessionOptions:
    """What one session may use. `folder` is its folder in a bare jail; `uid` its user where namespaces give none."""

    memory_mb: int
    disk_mb: int
    cpu_s: int
    folder: str
    uid: int


def list_paths() -> list[str]:
    """Return the interpreter, its packages and the system's libraries: all that can be seen inside."""
    paths = {*SYSTEM, sys.executable, os.path.realpath(sys.executable), f"{sys.prefix}/pyvenv.cfg"}
    link = Path(sys.executable)
    while link.is_symlink():  # every step of the way to the interpreter
        link = Path(os.path.normpath(link.parent / link.readlink()))
        paths.add(str(link))
    paths.update(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    if sys.base_prefix not in ("/usr", "/"):
        paths.add(f"{sys.base_prefix}/lib")
    existing = sorted(path for path in paths if Path(path).exists())
    return [
        path
        for path in existing
        if not any(path.startswith(f"{other}/") and not Path(other).is_symlink() for other in existing)
    ]


def enter_small_root(root: str = COVERED) -> None:
    """Build a root folder over the folder `root`, and make it the root of this mount namespace."""
    kernel.mount(None, "/", None, RECURSIVE | PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEV, "size=1m,mode=0755")
    for path in list_paths():
        place_read_only(path, Path(root + path))
    for name in DEVICES:
        target = Path(root, "dev", name)
        target.parent.mkdir(exist_ok=True)
        target.touch()
        kernel.mount(f"/dev/{name}", str(target), None, BIND)
        kernel.seal(str(target), kernel.SEAL_READ_ONLY | kernel.SEAL_NO_SUID | kernel.SEAL_NO_EXEC)
    Path(root + FOLDER).mkdir()
    Path(root, "proc").mkdir()
    with suppress(OSError):  # containers refuse it; now, because it must happen while the old one is in sight
        kernel.mount("proc", f"{root}/proc", "proc", NO_SUID | NO_DEV | NO_EXEC)
    if not Path(root, "tmp").exists():  # it does where the interpreter or its packages are below /tmp
        Path(root, "tmp").symlink_to(FOLDER)
    Path(root, "dev/shm").symlink_to(FOLDER)  # locks of multiprocessing are files there
    kernel.seal(root, READ_ONLY)
    kernel.enter_root(root)


def place_read_only(path: str, target: Path) -> None:
    """Make `path` visible at `target`, read-only; a link stays a link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if Path(path).is_symlink():
        if not target.is_symlink():
            target.symlink_to(Path(path).readlink())
        return
    if Path(path).is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    kernel.mount(path, str(target), None, BIND | RECURSIVE)
    kernel.seal(str(target), READ_ONLY, recursive=True)


def enter_session_spaces(jail: JailOptions, session: SessionOptions, proc: int) -> None:
    """Enter the namespaces of a session and mount its folder. The next process is the first of its namespace."""
    spaces = kernel.NEW_MOUNT | kernel.NEW_IPC | kernel.NEW_PID | kernel.NEW_NET
    kernel.unshare(spaces | kernel.NEW_USER if jail.user_spaces else spaces)
    if jail.user_spaces:
        kernel.map_user(proc, kernel.OUTER_USER, kernel.OUTER_USER)
    owner = kernel.OUTER_USER if jail.user_spaces else session.uid
    size = f"size={session.disk_mb}m,nr_inodes=4096,mode=0700,uid={owner},gid={owner}"
    kernel.mount("tmpfs", FOLDER, "tmpfs", NO_SUID | NO_DEV, size)


def mount_own_proc() -> None:
    """Show only the processes of this namespace in /proc, or none where the kernel refuses that."""
    try:
        kernel.mount("proc", "/proc", "proc", NO_SUID | NO_DEV | NO_EXEC, "hidepid=2,subset=pid")
    except OSError:
        kernel.mount("tmpfs", "/proc", "tmpfs", NO_SUID | NO_DEV, "size=4k,mode=0555,ro")


def confine(jail: JailOptions, session: SessionOptions, used_bytes: int, readable: list[str]) -> int:
    """Give up every right; the calling process is then ready for untrusted code. Return the version of Landlock.

    `used_bytes` is the address space of the template.
    """
    os.setsid()
    limit_resources(jail, session, used_bytes)
    if jail.root and not jail.user_spaces:
        kernel.drop_bounding_set()
        kernel.become(session.uid)
    kernel.die_with_parent()
    kernel.new_keyring()
    kernel.prctl(kernel.NO_NEW_PRIVILEGES, 1)
    if jail.root or not jail.bare:
        kernel.drop_bounding_set()
        kernel.drop_capabilities()
    os.chdir(session.folder)
    devices = [f"/dev/{name}" for name in DEVICES]
    version = kernel.landlock([*readable, *devices] if jail.bare else ["/"], session.folder)
    seccomp.install(seccomp.program(jail.bare))
    return version


def limit_resources(jail: JailOptions, session: SessionOptions, used_bytes: int) -> None:
    """Set the limits of each process."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    counted_alone = jail.root if jail.bare else jail.root or release >= COUNTED_BY_NAMESPACE
    tasks = MAX_TASKS if counted_alone else MAX_TASKS + tasks_of(os.getuid())
    for kind, value in (
        (resource.RLIMIT_AS, used_bytes + (session.memory_mb << 20)),
        (resource.RLIMIT_CPU, session.cpu_s),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NPROC, tasks),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
    ):
        kernel.limit(kind, value, value)


def tasks_of(uid: int) -> int:
    """Return how many processes and threads a user has now, as far as /proc shows them."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == uid:
                count += len(list((folder / "task").iterdir()))
    return count
