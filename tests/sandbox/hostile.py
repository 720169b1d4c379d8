"""What untrusted code tries from inside the jail. The text of this file runs in a session, after `T`, its targets.

A function returns what it reached, or None, or raises an exception: the last two say that the attack was stopped. The
name of a function is that of its attack; `jail_attacks.py` runs them.
"""

import ctypes
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time

T = globals().get("T", {})  # targets, by name
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
MIB = 1 << 20
ENOUGH = 600  # MiB; the session may have 512
ARM = os.uname().machine == "aarch64"


def call(x86, arm, *args):
    """Call the kernel by number."""
    result = libc.syscall(arm if ARM else x86, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# ---- sockets


def connect_to(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
        return "connected"


def unix_socket_of_the_user():
    return connect_to(T["socket_0600"])


def unix_socket_of_everybody():
    return connect_to(T["socket_0777"])


def abstract_unix_socket():
    return connect_to("\0" + T["abstract"])


def datagram_from_a_socket_pair():
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return f"{one.sendto(b'x', T['datagram'])} byte sent"


def tcp_to_this_machine():
    with socket.create_connection(("127.0.0.1", T["tcp"]), 1):
        return "connected"


def udp_to_this_machine():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        return f"{one.sendto(b'x', ('127.0.0.1', T['udp']))} byte sent"


def netlink_socket():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as one:
        one.bind((0, 0))
        return "bound"


# ---- memory and disk


def shared_segments():
    """Segments of System V fit a limit of address space one by one, and stay when they are detached."""
    for number in range(12):
        handle = libc.shmget(T["segments"] + number, 256 * MIB, 0o1666)
        if handle < 0:
            raise OSError(ctypes.get_errno(), "shmget")
        at = libc.shmat(handle, None, 0)
        if at in (None, ctypes.c_void_p(-1).value):
            return f"{number} segments"
        ctypes.memset(at, 1, 256 * MIB)
        libc.shmdt(ctypes.c_void_p(at))
    return "3072 MiB"


def write_until(files, wanted):
    """Write into files until `wanted` MiB lie there; return how many do."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    block, done = b"x" * MIB, 0
    for fd in files:
        try:
            while done < wanted and os.write(fd, block) == MIB:
                done += 1
        except OSError:
            pass
    return done


def files_in_memory():
    total = write_until((os.memfd_create("x") for _ in range(30)), 1500)
    return f"{total} MiB" if total > ENOUGH else None


def full_disk():
    total = write_until((os.open(f"fill{n}", os.O_CREAT | os.O_WRONLY) for n in range(40)), 1500)
    return f"{total} MiB" if total > ENOUGH else None


def children_that_hold(count, mib, hold):
    """Start children that each hold memory; wait until all do, and then for a watcher to notice."""
    readable, tell = os.pipe()
    for _ in range(count):
        if os.fork() == 0:
            try:
                kept = hold()
                os.write(tell, b"1")
                time.sleep(1000)
            finally:
                del kept
                os._exit(0)
    os.close(tell)
    held, deadline = 0, time.monotonic() + 8
    while held < count and select.select([readable], [], [], max(deadline - time.monotonic(), 0))[0]:
        if not (said := os.read(readable, 100)):
            return None  # all children have failed
        held += len(said)
    time.sleep(1)
    return f"{held} x {mib} MiB" if held * mib > ENOUGH else None


def children_with_memory():
    return children_that_hold(12, 250, lambda: bytearray(b"x") * (250 * MIB))


def children_that_hide_their_memory():
    libc.prctl(4, 0, 0, 0, 0)  # not dumpable: an ordinary user may not look at them
    return children_with_memory()


def shared_mapping(mib):
    area = mmap.mmap(-1, mib * MIB)
    for offset in range(0, mib * MIB, MIB):
        area[offset : offset + MIB] = b"x" * MIB
    return area


def shared_memory_of_children():
    """No process has more than 100 MiB."""
    return children_that_hold(14, 100, lambda: shared_mapping(100))


def shared_memory():
    areas = [shared_mapping(100) for _ in range(20)]
    return f"{100 * len(areas)} MiB"


def fork_bomb():
    count = 0
    try:
        while count < 200:
            if os.fork() == 0:
                time.sleep(1000)
            count += 1
    except OSError:
        pass
    return f"{count} processes" if count > 40 else None


def thread_bomb():
    threading.stack_size(1 << 16)
    count = 0
    try:
        for _ in range(400):
            threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
            count += 1
    except RuntimeError:
        pass
    return f"{count} threads" if count > 100 else None


# ---- files


def change_a_mode():
    return os.chmod(T["file"], 0o640) or "changed"


def change_times():
    return os.utime(T["file"], (1, 1)) or "changed"


def set_an_attribute():
    return os.setxattr(T["file"], "user.x", b"x") or "set"


def make_a_hard_link():
    return os.link(T["file"], "stolen") or "made"


def ask_whether_a_file_exists():
    def answer(path):
        try:
            return os.stat(path).st_size
        except OSError as error:
            return error.strerror

    there, missing = answer(T["visible"]), answer(T["visible"] + "_not")
    return f"{there} bytes / {missing}" if there != missing else None


def read_a_file_of_the_user():
    with open(T["file"]) as file:
        return file.read(4)


def list_a_folder_of_the_user():
    return f"{len(os.listdir(os.path.dirname(T['file'])))} names"


def read_the_list_of_users():
    with open("/etc/passwd") as file:
        return file.read(4)


def list_sys():
    return f"{len(os.listdir('/sys'))} names"


def write_outside():
    with open(T["write"], "w") as file:
        return f"{file.write('x')} byte"


def write_into_the_library():
    with open(os.path.join(os.path.dirname(os.__file__), "x.py"), "w") as file:
        return f"{file.write('x')} byte"


# ---- other processes


def read_an_environment():
    with open(f"/proc/{T['victim']}/environ") as file:
        return file.read(4)


def list_processes():
    count = sum(name.isdigit() for name in os.listdir("/proc"))
    return f"{count} processes" if count > 8 else None


def signal_a_process():
    return os.kill(T["victim"], signal.SIGCONT) or "sent"


def signal_the_parent():
    return None if os.getppid() <= 2 else os.kill(os.getppid(), signal.SIGCONT) or "sent"


def limit_a_process():
    resource.prlimit(T["victim"], resource.RLIMIT_CORE, (0, 0))
    return "changed"


def slow_down_a_process():
    return os.setpriority(os.PRIO_PROCESS, T["victim"], 19) or "changed"


def trace_a_process():
    return call(101, 117, 0x4206, T["victim"], 0, 0) or "traced"


def be_traced():
    return call(101, 117, 0, 0, 0, 0) or "traced"


def read_memory_of_the_parent():
    buffer = ctypes.create_string_buffer(8)
    to = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    from_there = (ctypes.c_void_p * 2)(id(os), 8)  # a fork has the addresses of its template
    return f"{call(310, 270, os.getppid(), to, 1, from_there, 1, 0)} bytes"


def open_memory_of_the_parent():
    return f"descriptor {os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR)}"


def outlive_the_session():
    """`jail_attacks.py` looks for a process of this name."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            libc.prctl(15, T["daemon"].encode(), 0, 0, 0)
            os.closerange(0, 256)
            time.sleep(1000)
        os._exit(0)


# ---- the kernel


def session_keyring():
    key = call(250, 219, 10, ctypes.c_long(-3), b"user", T["key"].encode(), 0)
    buffer = ctypes.create_string_buffer(100)
    call(250, 219, 11, key, buffer, 100)
    return buffer.value.decode()


def io_uring():
    return f"descriptor {call(425, 425, 8, ctypes.create_string_buffer(120))}"


def bpf():
    return f"descriptor {call(321, 280, 0, struct.pack('=IIII', 1, 4, 4, 1) + bytes(112), 128)}"


def userfaultfd():
    return f"descriptor {call(323, 282, 1)}"


def perf_events():
    return f"descriptor {call(298, 241, struct.pack('=IIQ', 1, 112, 0) + bytes(96), 0, -1, -1, 0)}"


def new_user_namespace():
    return call(272, 97, 0x10000000) or "made"


def new_mount_namespace():
    return call(272, 97, 0x20000) or "made"


def child_in_a_user_namespace():
    if call(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        os._exit(0)
    return "made"


# ---- what it is given


def type_into_the_terminal():
    for fd in (0, 1, 2):
        try:
            fcntl.ioctl(fd, 0x5412, b"x")
            return "typed"
        except OSError:
            pass
    return f"descriptor {os.open('/dev/tty', os.O_RDWR)}"


def descriptors_of_others():
    found = []
    for fd in range(5, 256):
        try:
            kind = os.fstat(fd).st_mode
        except OSError:
            continue
        if stat.S_ISSOCK(kind) or stat.S_ISDIR(kind) or stat.S_ISREG(kind):
            found.append(f"{fd}:{stat.S_IFMT(kind):o}")
    return " ".join(found) or None


def escape_codes_in_the_output():
    """`jail_attacks.py` looks for them."""
    sys.stdout.write("\033]0;title\007\033[2J\033[31m\n")


def attempt(name):
    """Return whether an attack got through, and what came of it."""
    try:
        reached = globals()[name]()
    except BaseException as error:
        return f"stopped: {type(error).__name__}: {str(error)[:80]}"
    return "stopped" if reached is None else f"GOT THROUGH: {reached}"
