"""The memory of jailed processes, counted from outside: nothing that they hold is counted for nobody."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf_suite.sandbox import kernel, memory
from rlhf_suite.sandbox.confine import FILE_BYTES
from rlhf_suite.sandbox.jail import choose_jail, templates
from rlhf_suite.sandbox.memory import (
    Watched,
    count_deleted_bytes,
    excess,
    look_at,
    proportional,
    remove_tree,
    resident,
)
from rlhf_suite.sandbox.session import Session

LONG_S = 60.0
MIB = 1 << 20
SET_NAME = 15  # PR_SET_NAME of prctl(2)


@pytest.fixture
def killed():
    return list[str]()


def watched(killed, pid=None, folder=None, memory_mb=1 << 20, disk_mb=64):
    return Watched(pid or os.getpid(), folder, memory_mb, disk_mb, killed.append)


@pytest.mark.notices(
    "a process whose first thread has ended has no memory",
    "sandbox/memory.py",
    "pages(pid) or max((pages(task) for task in tasks(pid)), default=0)",
    "pages(pid)",
)
def test_a_process_whose_first_thread_has_ended_still_has_its_memory():
    code = (
        "import ctypes, os, threading\n"
        "def work(kept=bytearray(b'x') * (64 << 20)):\n"
        "    while open(f'/proc/{os.getpid()}/stat').read().rpartition(') ')[2][0] != 'Z': pass\n"
        "    print('alone', flush=True); input()\n"
        "threading.Thread(target=work).start()\n"
        "ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "alone\n"
        assert memory.pages(child.pid) == 0
        assert memory.resident(child.pid) > 64 * MIB
        assert memory.proportional(child.pid) > 64 * MIB
        child.kill()


def test_descriptors_count_as_what_sockets_can_hold():
    pairs = [socket.socketpair() for _ in range(20)]
    try:
        open_now = len(list(Path("/proc/self/fd").iterdir()))
        assert abs(memory.measure_descriptors(os.getpid()) // memory.DESCRIPTOR_BYTES - (open_now - 16)) <= 2
        assert memory.measure_descriptors(os.getpid()) >= memory.measure_sockets(os.getpid())
        assert memory.measure_sockets(os.getpid()) >= (40 - 16) * memory.DESCRIPTOR_BYTES
    finally:
        for end in (end for pair in pairs for end in pair):
            end.close()


def test_mappings_and_file_locks_are_the_kernels_memory(tmp_path):
    me = os.getpid()
    before = memory.mappings(me, 1 << 40), memory.locks_of({str(me)})
    with (tmp_path / "locked").open("w") as file:
        areas = [mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE, prot=1 + index % 2) for index in range(100)]
        for byte in range(0, 100, 2):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
        assert memory.mappings(me, 1 << 40) >= before[0] + 90
        assert memory.locks_of({str(me)}) == before[1] + 50
        assert memory.in_kernel([me], 1 << 40) >= 50 * memory.LOCK_BYTES + 90 * memory.MAPPING_BYTES
        del areas


def test_a_count_of_mappings_stops_where_they_are_enough():
    assert 0 < memory.mappings(os.getpid(), 0) < memory.mappings(os.getpid(), 1 << 40) + 1


def test_deleted_files_count_while_they_are_open_or_mapped(tmp_path):
    me = os.getpid()
    before = memory.count_deleted_bytes([me])
    path = tmp_path / "gone"
    with path.open("w+b") as file:
        file.write(b"x" * MIB)
        file.flush()
        os.fsync(file.fileno())
        path.unlink()
        assert memory.count_deleted_bytes([me]) - before >= MIB
        area = mmap.mmap(file.fileno(), 4096)
    assert memory.count_deleted_bytes([me]) - before >= FILE_BYTES
    area.close()


@pytest.mark.notices(
    "a session whose memory cannot be counted ends the watcher",
    "sandbox/memory.py",
    "    except Exception as error:\n        why",
    "    except OSError as error:\n        why",
)
def test_a_session_whose_memory_cannot_be_counted_is_killed_and_others_are_watched(killed):
    look_at(watched(killed, folder="a name with \0 in it"), slowly=False)
    look_at(watched(killed, memory_mb=0, folder="/nowhere"), slowly=False)
    assert killed[0] == "its memory cannot be counted (ValueError)"
    assert killed[1].startswith("it used ")


@pytest.mark.notices(
    "a bare session may have any number of files",
    "sandbox/memory.py",
    "if entries > MAX_DISK_ENTRIES:",
    "if entries < 0:",
)
def test_a_bare_session_may_not_have_too_many_files_or_folders_in_one_another(killed, tmp_path):
    (tmp_path / "files").mkdir()
    for number in range(memory.MAX_DISK_ENTRIES + 1):
        (tmp_path / "files" / str(number)).touch()
    look_at(watched(killed, folder=str(tmp_path / "files")), slowly=False)
    deep = tmp_path / "deep"
    (deep / "/".join("d" * (memory.MAX_DEPTH + 1))).mkdir(parents=True)
    look_at(watched(killed, folder=str(deep)), slowly=False)
    assert killed == [
        f"it made more than {memory.MAX_DISK_ENTRIES} files and folders",
        f"it put more than {memory.MAX_DEPTH} folders in one another",
    ]


@pytest.mark.notices(
    "folders of a session are removed where they are",
    "sandbox/memory.py",
    'waiting.append(Path(entry).rename(top / f"{mark}.{len(waiting)}"))',
    "waiting.append(Path(entry))",
)
def test_a_tree_is_removed_however_deep_it_is_and_whatever_its_modes(tmp_path, request):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    top = tmp_path / "top"
    top.mkdir()
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", top], check=True))  # pytest removes no tree as deep
    before = Path.cwd()
    os.chdir(top)
    for _ in range(3000):
        Path("d").mkdir()
        os.chdir("d")
        Path("file").touch()
    Path("link").symlink_to(outside)
    os.chdir(before)
    (top / "closed").mkdir(0)
    remove_tree(str(top))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "outside"]


@contextmanager
def forked(prepare):
    """A child of this process, which has done `prepare` and sleeps."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        prepare()
        os.write(told, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ready)
    os.close(told)


FORGED = [b"\xff\xfe", *(f"{end}VmPTE: -99999".encode()[:15] for end in "\x1c\x1d\x1e\x85\u2028\r")]


@pytest.mark.notices(
    "a process may say in its name how much memory it has",
    "sandbox/memory.py",
    'return Path(path).read_bytes().split(b"\\n")[:-1]',
    "return [line.encode() for line in Path(path).read_text().splitlines()]",
    cases="resident",
)
@pytest.mark.parametrize("measure", [resident, proportional])
@pytest.mark.parametrize("name", FORGED, ids=repr)
def test_the_memory_of_a_process_does_not_depend_on_its_name(measure, name):
    with forked(lambda: None) as plain, forked(lambda: kernel.libc.prctl(SET_NAME, name, 0, 0, 0)) as forging:
        assert Path(f"/proc/{forging}/comm").read_bytes() != Path(f"/proc/{plain}/comm").read_bytes()
        assert measure(forging) == pytest.approx(measure(plain), rel=0.2)


@pytest.mark.notices(
    "a deleted file is not counted where its name ends a line",
    "sandbox/memory.py",
    'return Path(path).read_bytes().split(b"\\n")[:-1]',
    "return Path(path).read_bytes().splitlines()",
)
@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x1c", "\x85", "\u2028", " "], ids=ascii)
def test_a_deleted_file_is_counted_whatever_its_name(tmp_path, end):
    def map_and_delete():
        path = tmp_path / f"a{end}b"
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            maps.append(mmap.mmap(file.fileno(), 4096))
        path.unlink()

    maps = []
    with forked(map_and_delete) as pid, forked(lambda: None) as plain:
        assert count_deleted_bytes([pid]) >= count_deleted_bytes([plain]) + FILE_BYTES


@pytest.mark.notices(
    "what the sockets of a session hold is not counted",
    "sandbox/memory.py",
    "+ sum(map(proportional, pids)) + sum(map(measure_sockets, pids))",
    "+ sum(map(proportional, pids))",
)
@pytest.mark.notices(
    "the kernel's memory of file locks is not counted",
    "sandbox/memory.py",
    "used = locks_of(set(map(str, pids))) * LOCK_BYTES",
    "used = 0",
)
@pytest.mark.parametrize(
    ("hold", "mib"),
    [
        ("import socket\nkept = [socket.socketpair() for _ in range(25)]", 5),
        ("import fcntl\nfile = open('x', 'w')\nfor n in range(0, 40000, 2): fcntl.lockf(file, fcntl.LOCK_EX, 1, n)", 4),
    ],
    ids=["sockets", "file locks"],
)
def test_what_the_kernel_holds_for_a_session_counts(hold, mib):
    with Session(templates.get(choose_jail(False, ""))) as one:
        one.run("1", LONG_S)
        limits = Watched(one.process.pid, None, 0, 64, lambda why: None)
        before = int(excess(limits).split()[2])
        assert one.run(hold, LONG_S).problem is None
        assert int(excess(limits).split()[2]) >= before + mib
