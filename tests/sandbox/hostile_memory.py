"""What untrusted code tries against the limit of memory, the machine as a whole, and other sessions.

The text of this file follows that of `hostile.py` in the session; the same rules hold.
"""

libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PRIVATE, SHARED, ANONYMOUS, HUGE_PAGES = 2, 1, 0x20, 0x40000


# ---- memory that no process seems to have


def mapped(mib, flags, fd=-1, rights=3):
    """Return the address of a new mapping."""
    at = libc.mmap(None, mib * MIB, rights, flags, fd, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return at


def keep_one_page_of_each(mapping):
    """Touch 100 MiB of shared memory and unmap all but one page of it, which keeps the whole, again and again."""
    for _ in range(10):
        at = mapping()
        if libc.madvise(at, 100 * MIB, 22) < 0:  # read every page
            ctypes.memset(at, 1, 100 * MIB)
        libc.munmap(at + 4096, 100 * MIB - 4096)
    time.sleep(1.5)
    return "1000 MiB in one process"


def shared_pages_that_are_unmapped():
    return keep_one_page_of_each(lambda: mapped(100, SHARED | ANONYMOUS))


def shared_pages_of_a_device():
    """Reading is enough."""
    return keep_one_page_of_each(lambda: mapped(100, SHARED, os.open("/dev/zero", os.O_RDONLY), 1))


def shared_pages_that_are_validated():
    """MAP_SHARED_VALIDATE is another number for the same."""
    return keep_one_page_of_each(lambda: mapped(100, 3 | ANONYMOUS))


def shared_pages_that_are_not_needed():
    def hold():
        for _ in range(4):
            at = mapped(90, SHARED | ANONYMOUS)
            ctypes.memset(at, 1, 90 * MIB)
            libc.madvise(at, 90 * MIB, 4)
        return at

    mapped(1, SHARED | ANONYMOUS)
    return children_that_hold(4, 360, hold)


def huge_pages_of_the_machine():
    return f"address {mapped(64, PRIVATE | ANONYMOUS | HUGE_PAGES)}"


def files_that_are_deleted():
    """Each file is within the limit; it has no name any more and is open, or mapped by one page."""
    total = 0
    for number in range(20):
        fd = os.open(f"deleted{number}", os.O_CREAT | os.O_RDWR)
        total += write_until([fd], 50)
        at = libc.mmap(None, 4096, 3, SHARED, fd, 0)
        os.unlink(f"deleted{number}")
        if at not in (None, ctypes.c_void_p(-1).value):
            os.close(fd)
    time.sleep(1.5)
    return f"{total} MiB" if total > ENOUGH else None


def children_without_a_first_thread():
    """/proc/<pid>/statm of a process whose first thread has ended is 0."""
    readable, tell = os.pipe()
    for _ in range(6):
        if os.fork() == 0:

            def work(me):
                while open(f"/proc/{me}/stat").read().rpartition(") ")[2][0] != "Z":
                    time.sleep(0.02)
                kept = bytearray(b"x") * (250 * MIB)
                os.write(tell, b"1")
                time.sleep(1000)
                del kept

            threading.Thread(target=work, args=(os.getpid(),)).start()
            libc.syscall(93 if ARM else 60, 0)
    held, deadline = 0, time.monotonic() + 8
    while held < 6 and select.select([readable], [], [], max(deadline - time.monotonic(), 0))[0]:
        held += len(os.read(readable, 100))
    time.sleep(1)
    return f"{held} x 250 MiB" if held * 250 > ENOUGH else None


def fill_sockets(count):
    """Return pairs of sockets, as full as they become, and the bytes in them."""
    pairs, total = [], 0
    for _ in range(count):
        one, other = socket.socketpair()
        pairs.append((one, other))
        for each in (one, other):
            each.setblocking(False)
            try:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 26)
            except OSError:
                pass
            try:
                while True:
                    total += each.send(b"x" * (1 << 16))
            except OSError:
                pass
    return pairs, total


def full_sockets():
    """The limit here is what the sockets of 14 processes hold by themselves: about 150 MiB beside the pages."""
    total = 0
    readable, tell = os.pipe()
    for _ in range(14):
        if os.fork() == 0:
            pairs, filled = fill_sockets(28)
            os.write(tell, struct.pack("=Q", filled))
            time.sleep(1000)
            del pairs
    for _ in range(14):
        total += struct.unpack("=Q", os.read(readable, 8))[0]
    return f"{total // MIB} MiB" if total // MIB > 200 else None


def descriptors_on_their_way():
    """A socket can hold descriptors of sockets that are full."""
    pairs, filled = fill_sockets(10)
    one, _ = socket.socketpair()
    return f"{socket.send_fds(one, [b'x'], [pair[0].fileno() for pair in pairs])} bytes, {filled // MIB} MiB"


def huge_pages_in_a_pipe():
    """One byte of a huge page in a pipe keeps all of it."""
    readable, writable = os.pipe()
    at = mapped(4, PRIVATE | ANONYMOUS)
    ctypes.memset(at, 1, 4 * MIB)
    piece = ctypes.create_string_buffer(struct.pack("=QQ", at, 1), 16)
    return f"{call(278, 75, writable, piece, 1, 0)} byte, its page is kept by {readable}"


def pages_of_a_file_in_a_pipe():
    with open(os.__file__, "rb") as file:
        return f"{os.sendfile(os.pipe()[1], file.fileno(), 0, 1)} byte"


def many_mappings():
    """The kernel needs memory for each mapping, in each process."""
    at = mapped(240, PRIVATE | ANONYMOUS)
    ctypes.memset(at, 1, 240 * MIB)
    count = 0
    for number in range(0, 60000, 2):
        count += 2 * (libc.mprotect(at + number * 4096, 4096, 1) == 0)
    children = 0
    try:
        while children < 13:
            if os.fork() == 0:
                time.sleep(1000)
            children += 1
    except OSError:
        pass
    time.sleep(3)
    return f"{count} mappings in {children} children" if count * children > 500_000 else None


def many_file_locks():
    fd = os.open("locked", os.O_CREAT | os.O_RDWR)
    count, at, end = 0, 1 << 40, time.monotonic() + 2
    while time.monotonic() < end:
        for _ in range(1000):
            at -= 2
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, at)
        count += 1000
    return f"{count} locks" if count * 256 > 512 * MIB else None


def deep_folders():
    """Whoever measures or removes them by recursion fails."""
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")
    time.sleep(1.5)
    return "3000 folders in one another" if T.get("bare") else None


# ---- what all programs of the machine share


def asynchronous_requests_of_the_machine():
    handle = ctypes.c_ulong(0)
    return f"context {call(206, 0, 1000, ctypes.byref(handle))}"


def watches_of_files():
    fd = call(294, 26, 0)
    return f"watch {libc.inotify_add_watch(fd, os.path.dirname(os.__file__).encode(), 0x20)}"


def flush_all_disks():
    return call(162, 81) or "flushed"


def flush_a_disk():
    return call(306, 267, os.open(".", os.O_RDONLY)) or "flushed"


def drop_the_library_from_memory():
    return os.posix_fadvise(os.open(os.__file__, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED) or "dropped"


# ---- other sessions


def lock_of_the_library():
    return fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB) or "locked"


def message_in_a_lock():
    """One session locks a byte whose number is the message, another asks which byte is locked."""
    fd = os.open(os.__file__, os.O_RDONLY)
    fcntl.lockf(fd, fcntl.LOCK_SH, 1, 12345)
    question = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
    return f"locked: {struct.unpack('hhqqi4x', fcntl.fcntl(fd, fcntl.F_GETLK, question))}"


def lease_of_the_library():
    return f"lease {fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_GETLEASE)}"


def notice_of_a_folder():
    return f"{fcntl.fcntl(os.open(os.path.dirname(os.__file__), os.O_RDONLY), fcntl.F_NOTIFY, 1)}"


def interrupt_the_guard():
    os.kill(1, signal.SIGINT)
    time.sleep(0.2)
