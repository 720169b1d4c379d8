"""The system calls that untrusted code may not make: a seccomp filter, built by hand for x86-64 and arm64.

A refused call returns EPERM. Calls that a C library replaces by others when they are missing return ENOSYS, and so does
every number from `FIRST_UNKNOWN` on: a new call stays closed until somebody has looked at it. This file imports nothing
but `kernel`: it is loaded by the processes of the jail.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from rlhf_suite.sandbox.kernel import DEATH_SIGNAL, IS_ARM, check, libc

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ARCHITECTURE = 0xC00000B7 if IS_ARM else 0xC000003E
SET_SECCOMP, FILTER_MODE = 22, 2
FIRST_UNKNOWN = 451  # all numbers of x32, the second table of x86-64, are above it too
NEW_SPACES = 0x7E020080  # flags of clone: mount, cgroup, uts, ipc, user, pid, net, time namespace
THREAD = 0x10000  # flag of clone
UNIX, STREAM, TYPE_OF_SOCKET = 1, 1, 0xF
SHARED, ANONYMOUS, HUGE_PAGES = 1, 0x20, 0x40000  # flags of mmap
# Commands of fcntl: ask for locks of others (F_GETLK, F_OFD_GETLK), leases, watches of folders, the size of a pipe. A
# file may still be locked, as sqlite3 does.
FCNTL_REFUSED = (5, 36, 1024, 1025, 1026, 1031)
TYPE_INTO_TERMINAL = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD

# Numbers on x86-64 and on arm64; None where the machine has no such call.
Numbers = tuple[int | None, int | None]
REFUSED: dict[str, Numbers] = {
    **{"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)},
    **{"accept": (43, 202), "accept4": (288, 242)},
    **{"shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191)},
    **{"msgget": (68, 186), "msgctl": (71, 187), "mq_open": (240, 180)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_getfd": (438, 438)},
    **{"move_pages": (279, 239), "migrate_pages": (256, 238)},
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"unshare": (272, 97), "setns": (308, 268)},
    **{"name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265)},
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60)},
    **{"quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112)},
    **{"adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162)},
    **{"iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "syslog": (103, 116)},
    **{"vhangup": (153, 58), "fanotify_init": (300, 262), "lookup_dcookie": (212, 18)},
    **{"nfsservctl": (180, 42), "personality": (135, 92)},
    # Memory that no limit of a process counts: pages that pipes and sockets hold, and descriptors under way in them.
    **{"vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "sendfile": (40, 71)},
    **{"setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269)},
    **{"remap_file_pages": (216, 234), "mbind": (237, 235), "set_mempolicy": (238, 237)},
    "set_mempolicy_home_node": (450, 450),
    # What all programs of the machine or of the user share: requests for asynchronous reads, watches, disks, caches.
    **{"io_setup": (206, 0), "io_destroy": (207, 1), "io_getevents": (208, 4), "io_submit": (209, 2)},
    **{"io_cancel": (210, 3), "io_pgetevents": (333, 292), "sync": (162, 81), "syncfs": (306, 267)},
    **{"inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27)},
    **{"inotify_rm_watch": (255, 28), "fanotify_mark": (301, 263), "fadvise64": (221, 223)},
    # Locks on files of the library would tell other sessions something.
    "flock": (73, 32),
}
# Only where no mount and process namespace stands in front: calls that reach files and processes of the user.
REFUSED_IF_BARE: dict[str, Numbers] = {
    **{"fork": (57, None), "vfork": (58, None)},
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55)},
    **{"lchown": (94, None), "fchownat": (260, 54)},
    **{"utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "getxattr": (191, 8), "lgetxattr": (192, 9)},
    **{"listxattr": (194, 11), "llistxattr": (195, 12)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130)},
    **{"pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "process_mrelease": (448, 448)},
    **{"setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119)},
    **{"sched_setparam": (142, 118), "sched_setattr": (314, 274), "ioprio_set": (251, 30)},
}
CLONE, CLONE3, IOCTL, SOCKETPAIR = (56, 220), (435, 435), (16, 29), (53, 199)
MMAP, FCNTL = (9, 222), (72, 25)
SIGNALS, PRLIMIT, PRCTL = ((62, 129), (234, 131)), (302, 261), (157, 167)  # SIGNALS: kill, tgkill


def step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction. A test jumps over `if_true` or `if_false` instructions."""
    return struct.pack("=HBBI", operation, if_true, if_false, value & 0xFFFFFFFF)


def load_argument(index: int) -> bytes:
    """Return the instruction that loads the low half of an argument."""
    return step(LOAD, 16 + 8 * index)


def on_call(numbers: Numbers, *body: bytes) -> bytes:
    """Return instructions for one system call, nothing where the machine lacks it. `body` must return."""
    number = numbers[IS_ARM]
    block = b"".join(body)
    return b"" if number is None else step(IF_EQUAL, number, 0, len(block) // 8) + block


def program(is_bare: bool) -> bytes:
    """Return the filter, in a bare jail with the process of this call as the only one that it may signal."""
    refuse, missing, allow = (
        step(RETURN, REFUSE | errno.EPERM),
        step(RETURN, REFUSE | errno.ENOSYS),
        step(RETURN, ALLOW),
    )
    no_new_spaces = step(IF_ANY_BIT, NEW_SPACES, 0, 1) + refuse
    only_threads = step(IF_ANY_BIT, THREAD, 1, 0) + refuse if is_bare else b""
    typing = b"".join(step(IF_EQUAL, number, 0, 1) + refuse for number in TYPE_INTO_TERMINAL)
    asking = b"".join(step(IF_EQUAL, number, 0, 1) + refuse for number in FCNTL_REFUSED)
    # Shared pages without a file live as long as one of them is mapped, in the address space of nobody.
    shared = step(IF_ANY_BIT, ANONYMOUS, 0, 2) + step(IF_ANY_BIT, SHARED, 0, 1) + refuse
    parts = [
        step(LOAD, 4) + step(IF_EQUAL, ARCHITECTURE, 1, 0) + step(RETURN, KILL),
        step(LOAD, 0) + step(IF_AT_LEAST, FIRST_UNKNOWN, 0, 1) + missing,
        on_call(CLONE3, missing),  # its flags are in memory, where no filter can read
        on_call(CLONE, load_argument(0), no_new_spaces, only_threads, allow),
        on_call(IOCTL, load_argument(1), typing, allow),
        on_call(FCNTL, load_argument(1), asking, allow),
        on_call(MMAP, load_argument(3), step(IF_ANY_BIT, HUGE_PAGES, 0, 1), refuse, shared, allow),
        # A pair of datagram sockets could send to any path.
        on_call(
            SOCKETPAIR,
            *(load_argument(0), step(IF_EQUAL, UNIX, 1, 0), refuse),
            *(load_argument(1), step(AND, TYPE_OF_SOCKET), step(IF_EQUAL, STREAM, 1, 0), refuse, allow),
        ),
        *(on_call(numbers, refuse) for numbers in REFUSED.values()),
    ]
    if is_bare:
        me = os.getpid()
        parts += [on_call(numbers, refuse) for numbers in REFUSED_IF_BARE.values()]
        parts += [on_call(call, load_argument(0), step(IF_EQUAL, me, 1, 0), refuse, allow) for call in SIGNALS]
        of_itself = step(IF_EQUAL, 0, 2, 0) + step(IF_EQUAL, me, 1, 0) + refuse
        parts.append(on_call(PRLIMIT, load_argument(0), of_itself, allow))
        parts.append(on_call(PRCTL, load_argument(0), step(IF_EQUAL, DEATH_SIGNAL, 0, 1), refuse, allow))
    return b"".join([*parts, allow])


def no_namespaces() -> bytes:
    """Return a filter that refuses namespaces and mounts, as those of containers do: to try a jail without them."""
    refuse = step(RETURN, REFUSE | errno.EPERM)
    return b"".join(
        [
            step(LOAD, 0),
            *(on_call(REFUSED[name], refuse) for name in ("mount", "umount2", "pivot_root", "unshare", "setns")),
            on_call(CLONE, load_argument(0), step(IF_ANY_BIT, NEW_SPACES, 0, 1), refuse, step(RETURN, ALLOW)),
            on_call(CLONE3, step(RETURN, REFUSE | errno.ENOSYS)),
            step(RETURN, ALLOW),
        ]
    )


def install(code: bytes) -> None:
    """Install a filter for this process and its children. NO_NEW_PRIVILEGES must be set before."""
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    check(libc.prctl(SET_SECCOMP, FILTER_MODE, header, 0, 0), "seccomp")
