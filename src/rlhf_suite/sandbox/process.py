"""Templates and jailed processes, seen from outside: start them, talk to them through pipes, kill them.

Nothing here trusts what a jailed process says, and no wait is without a deadline. The same object serves a caller that
waits (`wait`) and one in an event loop (`wait_async`), which needs no thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from rlhf_suite.foreign_text import printable
from rlhf_suite.sandbox.confine import FOLDER, JailOptions, SessionOptions
from rlhf_suite.sandbox.memory import Watched, remove_tree, watcher
from rlhf_suite.sandbox.template import ENDED, ENVIRONMENT, ERROR

SOURCES = Path(__file__).resolve().parents[2]
LAUNCH = "import sys; sys.path.insert(0, {!r}); from rlhf_suite.sandbox.template import run_here; run_here()"
START_S = 120.0  # limit for the imports of a template, and for the start of a session
END_S = 5.0  # how long a template is given to end by itself
MAX_OUTPUT_BYTES = 1 << 20  # of each stream; the rest is dropped
MAX_DROPPED_BYTES = 16 << 20  # then the session ends
MAX_REPLY_BYTES = 1 << 20
TAIL_BYTES = 300  # of the errors, quoted in messages
FIRST_UID, UIDS = 1_800_000_000, 200_000_000  # users that exist nowhere: each template of root begins at one of them
MAX_STARTING = 16  # sessions that an event loop starts at a time
FD_LIMIT = "too many files are open; raise the limit (ulimit -n): a session needs 5"


class SandboxError(RuntimeError):
    """The jail itself does not work: it says nothing about the code that was to run."""


@dataclass(frozen=True)
class Resources:
    """What the processes of a session may use together, in MiB, and each of them in seconds of CPU time."""

    memory_mb: int = 512
    disk_mb: int = 64
    cpu_s: int = 600


class Template:
    """A process in a jail that sessions are forked from. It imports `options.imports` first."""

    def __init__(self, options: JailOptions) -> None:
        """Start the process. `wait_ready` waits for its imports."""
        self.options = options = replace(options, uid=FIRST_UID + secrets.randbelow(UIDS))
        self.is_ready, self.lock, self.sessions = False, threading.Lock(), 0
        self.slots = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-c",
                    LAUNCH.format(str(SOURCES)),
                    str(theirs.fileno()),
                    json.dumps(asdict(options)),
                ],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until the template can fork sessions; raise SandboxError with the reason if it cannot."""
        with self.lock:
            if self.is_ready:
                return
            self.control.settimeout(START_S)
            try:
                said = self.control.recv(1000)
            except OSError as error:
                said = ERROR + str(error).encode()
            if said != b"ready":
                raise SandboxError(printable(said.removeprefix(ERROR).decode(errors="replace") or "it ended"))
            self.is_ready = True

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def request(self, resources: Resources, folder: str, fds: Sequence[int]) -> None:
        """Ask for a session with these descriptors."""
        with self.lock:
            self.sessions += 1
            uid = self.options.uid + self.sessions
        if self.options.root and self.options.bare:
            os.chown(folder, uid, uid)
        message = json.dumps(asdict(SessionOptions(**asdict(resources), folder=folder, uid=uid))).encode()
        try:
            socket.send_fds(self.control, [message], fds)
        except OSError as error:
            raise SandboxError(f"the jail's template does not answer: {error}") from None

    def slot(self) -> asyncio.Semaphore:
        """Return the semaphore of this event loop that bounds how many sessions start at a time."""
        return self.slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_STARTING))

    def close(self) -> None:
        """End the template and all of its sessions; with namespaces, wait until they are gone."""
        self.control.close()
        try:
            self.popen.wait(END_S if self.is_ready else 0)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()  # no-limit: the kernel ends what is killed


def jail_options(bare: bool, user_spaces: bool = True, imports: tuple[str, ...] = ()) -> JailOptions:
    """Return the options of a template that this process starts."""
    return JailOptions(bare, user_spaces and not bare, os.geteuid() == 0, 0, imports)


class JailedProcess:
    """One session of a template: pipes for requests, replies and output, and the guard's socket."""

    def __init__(
        self,
        template: Template,
        resources: Resources,
        stdin: int | None = None,
        separate_errors: bool = False,
        peers: Sequence[int] = (),
    ) -> None:
        """Ask the template for a session and return at once.

        Args:
            template: must be ready.
            resources: limits.
            stdin: a descriptor to read from; None is an empty input. The caller closes it.
            separate_errors: keep standard errors apart from standard output.
            peers: further descriptors for the code, numbered from 5 on. The caller closes them.
        """
        self.output, self.errors, self.reply, self.to_send = bytearray(), bytearray(), bytearray(), b""
        self.dropped_bytes, self.output_bytes = 0, MAX_OUTPUT_BYTES
        self.is_ready = self.has_ended = self.is_closed = False
        self.exit_code: int | None = None
        self.killed_because: str | None = None
        self.problem: str | None = None  # of the jail, not of the code
        self.resources, self.pidfd, self.pid = resources, -1, 0
        self.watched: Watched | None = None  # once it is born
        self.folder: str | None = None
        self.lock = threading.Lock()
        theirs: list[int] = []
        self.streams: dict[int, bytearray] = {}
        self.asks = -1
        try:
            self.guard, guarded = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise SandboxError(f"{error.strerror}: {FD_LIMIT}") from None
        try:
            with guarded:
                self.folder = tempfile.mkdtemp(prefix="rlhf_suite_") if template.options.bare else None
                self._open(theirs, stdin, separate_errors)
                template.request(resources, self.folder or FOLDER, [*theirs, guarded.fileno(), *peers])
        except BaseException:
            self.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    def _open(self, theirs: list[int], stdin: int | None, separate_errors: bool) -> None:
        """Open our ends, and put those of the other side into `theirs`, in the order that a template takes."""
        try:
            theirs.append(os.dup(stdin) if stdin is not None else os.open("/dev/null", os.O_RDONLY))
            out, said = os.pipe()
            self.streams[out] = self.output
            theirs.append(said)
            if separate_errors:
                err, said = os.pipe()
                self.streams[err] = self.errors
            theirs.append(said if separate_errors else os.dup(said))
            asked, self.asks = os.pipe()
            theirs.append(asked)
            answers, answered = os.pipe()
            theirs.append(answered)
            self.streams[answers] = self.reply
        except OSError as error:
            raise SandboxError(f"{error.strerror}: {FD_LIMIT}") from None
        for fd in (*self.streams, self.asks):
            os.set_blocking(fd, False)
        self.guard.setblocking(False)

    def send(self, message: dict[str, object]) -> None:
        """Send a request, now or while `wait` waits."""
        data = json.dumps(message).encode()
        self.to_send += struct.pack(">I", len(data)) + data
        self._write()

    def interest(self) -> list[tuple[int, int]]:
        """Return the descriptors to wait for, each with POLLIN or POLLOUT."""
        if self.is_closed or self.has_ended:
            return []
        reading = [(fd, select.POLLIN) for fd in (*self.streams, self.guard.fileno())]
        return [*reading, (self.asks, select.POLLOUT)] if self.to_send else reading

    def pump(self) -> None:
        """Move what can be moved without waiting."""
        if self.is_closed or self.has_ended:
            return
        self._write()
        self._hear_guard()
        for fd in list(self.streams):
            self._read(fd)

    def _write(self) -> None:
        try:
            while self.to_send:
                self.to_send = self.to_send[os.write(self.asks, self.to_send) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.to_send = b""

    def _read(self, fd: int) -> None:
        kept = self.streams[fd]
        limit = MAX_REPLY_BYTES + 4 if kept is self.reply else MAX_OUTPUT_BYTES
        if kept is self.output:
            limit = self.output_bytes
        with suppress(BlockingIOError):
            while self.dropped_bytes <= MAX_DROPPED_BYTES:
                part = os.read(fd, 1 << 16)
                if not part:  # every writer has closed it
                    del self.streams[fd]
                    os.close(fd)
                    return
                room = max(limit - len(kept), 0)
                kept += part[:room]
                self.dropped_bytes += max(len(part) - room, 0)
            self.kill("it printed too much")

    def _hear_guard(self) -> None:
        with suppress(BlockingIOError):
            while not self.has_ended:
                try:
                    said, fds, _, _ = socket.recv_fds(self.guard, 2000, 1)
                except ConnectionResetError:
                    said, fds = b"", []
                if fds:
                    self._is_born(fds[0])
                elif said == b"ready":
                    self.is_ready = True
                elif said.startswith(ERROR):
                    self.problem = printable(said.removeprefix(ERROR).decode(errors="replace"))
                elif said.startswith(ENDED):
                    self.exit_code, self.has_ended = int(said.removeprefix(ENDED)), True
                elif not said:
                    self.has_ended = True

    def _is_born(self, pidfd: int) -> None:
        """Keep the descriptor by which the session can be killed, and let its memory be watched."""
        with self.lock:
            self.pidfd = pidfd
        info = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="utf-8")
        self.pid = next(int(line.split()[1]) for line in info.splitlines() if line.startswith("Pid:"))
        limits = self.resources
        self.watched = Watched(self.pid, self.folder, limits.memory_mb, limits.disk_mb, self.kill)
        watcher.add(self.watched)

    @property
    def start_problem(self) -> str | None:
        """Return why the session ended before any code ran in it, None if it did not."""
        if self.is_ready or not self.has_ended or self.killed_because:
            return None
        return self.problem or printable(self.errors.decode(errors="replace") + self.output.decode(errors="replace"))

    def describe_ending(self) -> str:
        """Return how the code ended, with the last line of its errors."""
        if self.killed_because is not None:
            return self.killed_because
        code = self.exit_code
        if code is None:
            return "its process was killed"
        is_signal = -code in {number.value for number in signal.Signals}
        how = f"it was ended by {signal.Signals(-code).name}" if is_signal else f"it ended early (exit code {code})"
        lines = bytes(self.errors[-TAIL_BYTES:]).decode(errors="replace").strip().splitlines()
        return printable(f"{how}: {lines[-1]}" if lines else how)

    def kill(self, why: str) -> None:
        """Kill every process of the session. The first reason is kept."""
        with self.lock:
            self.killed_because = self.killed_because or why
            if self.pidfd >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Kill the session and close its descriptors."""
        if self.watched is not None:
            watcher.remove(self.watched)
        self.kill("it was closed")
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            if self.folder is not None and self.pidfd >= 0:
                poller = select.poll()  # select takes no descriptor above 1023
                poller.register(self.pidfd, select.POLLIN)
                poller.poll(START_S * 1000)  # a dying process may still write
            for fd in (*self.streams, self.asks, self.pidfd):
                if fd >= 0:
                    os.close(fd)
            self.guard.close()  # a guard whose pidfd has not come yet ends by this
            self.pidfd = -1
        if self.folder is not None:
            remove_tree(self.folder)


def wait(processes: Sequence[JailedProcess], is_done: Callable[[], bool], deadline: float) -> bool:
    """Wait until `is_done`, or until the deadline of `time.monotonic`; return whether it is done."""
    while not is_done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        poller = select.poll()
        for fd, events in (interest for process in processes for interest in process.interest()):
            poller.register(fd, events)
        poller.poll(left * 1000 + 1)
        for process in processes:
            process.pump()
    return True


async def wait_async(process: JailedProcess, is_done: Callable[[], bool], deadline: float) -> bool:
    """Do what `wait` does in an event loop, by its readers and writers."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    offset = loop.time() - time.monotonic()
    while not is_done():
        woken.clear()
        watched = process.interest()
        for fd, events in watched:
            (loop.add_reader if events == select.POLLIN else loop.add_writer)(fd, woken.set)
        try:
            async with asyncio.timeout_at(deadline + offset):
                await woken.wait()
        except TimeoutError:
            return False
        finally:
            for fd, events in watched:
                (loop.remove_reader if events == select.POLLIN else loop.remove_writer)(fd)
        process.pump()
    return True
