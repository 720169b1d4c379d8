"""The processes of the jail that are ours: the launcher, the template that sessions are forked from, and their guards.

    supervisor (`session.py`, outside)
      `- launcher         enters namespaces, builds a small root folder
           `- template    the first process of its namespace; imports libraries, runs nothing untrusted, forks sessions
                `- guard       the first process of a session's own namespace: reaps, reports the exit code
                     `- interpreter    confined; the untrusted code runs here

The supervisor asks for a session by a message with descriptors: standard input, output and errors, requests, replies,
one end of a pair of sockets for the guard, and pipes to another session if there are any. On that pair come the pidfd
by which the session can be killed, b"ready" when the interpreter is confined, and its exit code at the end. Closing the
pair ends the session, closing the control socket ends the template with all of its sessions. Neither socket is open in
an interpreter.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rlhf_suite.sandbox import interpreter, kernel
from rlhf_suite.sandbox.confine import (
    JailOptions,
    SessionOptions,
    confine,
    enter_session_spaces,
    enter_small_root,
    list_paths,
    mount_own_proc,
)

MAX_REQUEST, MAX_FDS, MAX_FD = 1 << 16, 16, 1 << 16
GUARD = 5  # the place of the guard's socket among the descriptors of a request
ERROR = b"error "  # begins a message about a session that could not start
ENDED = b"ended "  # begins the message with the exit code of an interpreter
ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class TemplateState:
    """What a template knows: the machine's /proc, its own address space, the paths that a bare jail reads."""

    options: JailOptions
    proc: int
    used_bytes: int
    readable: list[str]


def main(control_fd: int, options_text: str) -> None:
    """Become a template; report b"ready" or a problem on the control socket."""
    options = JailOptions(**json.loads(options_text))
    control = socket.socket(fileno=control_fd)
    reset_inherited()
    try:
        proc = os.open("/proc", os.O_RDONLY)
        if not options.bare:
            enter_spaces(options, proc, control)
        state = load(options, proc)
    except Exception as error:
        control.send(ERROR + f"{type(error).__name__}: {error}".encode())
        return
    control.send(b"ready")
    signal.signal(signal.SIGCHLD, reap)
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(control, MAX_REQUEST, MAX_FDS)
        except ConnectionResetError:
            message = b""
        if not message:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            start_session(state, SessionOptions(**json.loads(message)), fds)
        for fd in fds:
            os.close(fd)


def reset_inherited() -> None:
    """Undo what a parent may have set: blocked signals, and a soft limit of CPU time that is its own."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def enter_spaces(options: JailOptions, proc: int, control: socket.socket) -> None:
    """Enter namespaces and a small root folder. The process that returns is the first of its namespace."""
    uid, gid = os.getuid(), os.getgid()
    spaces = kernel.NEW_MOUNT | kernel.NEW_IPC | kernel.NEW_PID | kernel.NEW_NET | kernel.NEW_UTS
    kernel.unshare(spaces if options.root else spaces | kernel.NEW_USER)
    if not options.root:
        kernel.map_user(proc, uid, gid)
    if first := os.fork():
        control.close()
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    kernel.die_with_parent()
    enter_small_root()
    if options.root and options.user_spaces:
        kernel.become(options.uid)
        kernel.prctl(kernel.DUMPABLE, 1)  # again, so that the files of /proc/self belong to this user
        kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNT)
        kernel.map_user(proc, options.uid, options.uid)
        kernel.die_with_parent()


def load(options: JailOptions, proc: int) -> TemplateState:
    """Import what sessions start with."""
    kernel.prctl(kernel.NO_NEW_PRIVILEGES, 1)
    for name in options.imports:
        with suppress(ImportError):  # a session that imports it gets the same error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collections in sessions write to fewer shared pages
    with os.fdopen(os.open("self/statm", os.O_RDONLY, dir_fd=proc)) as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    return TemplateState(options, proc, used_bytes, list_paths() if options.bare else [])


def reap(*_: object) -> None:
    """Forget ended processes: starters, and the guards that they leave to this process."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def start_session(state: TemplateState, session: SessionOptions, fds: Sequence[int]) -> None:
    """Start a guard and an interpreter; this process, a fork of the template, never returns."""
    guard = socket.socket(fileno=fds[GUARD])
    try:
        if state.options.bare:
            kernel.die_with_parent()
            keep_guard(state, session, fds, guard)
        enter_session_spaces(state.options, session, state.proc)
        if first := os.fork():
            try:
                socket.send_fds(guard, [b"pidfd"], [os.pidfd_open(first)])
            except OSError:  # the supervisor has given the session up
                os.kill(first, signal.SIGKILL)
            os._exit(0)
        mount_own_proc()
        keep_guard(state, session, fds, guard)
    except BaseException as error:
        with suppress(OSError):
            guard.send(ERROR + f"{type(error).__name__}: {error}".encode()[:1000])
    os._exit(1)


def keep_guard(state: TemplateState, session: SessionOptions, fds: Sequence[int], guard: socket.socket) -> None:
    """Fork the interpreter; reap what ends, report the interpreter's exit code, and end with it or with the socket."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # code could send it before Landlock 6, and Python would raise
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become_interpreter(state, session, fds)
    if state.options.bare:
        socket.send_fds(guard, [b"pidfd"], [os.pidfd_open(child)])
    keep_only([wake, woken, guard.fileno()])
    if not state.options.bare:  # there it needs them to kill, and there no untrusted code can start a process
        kernel.drop_capabilities()
    kernel.prctl(kernel.DUMPABLE, 0)  # nobody inside opens its memory
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    poller.register(guard, 0)  # the end of the connection is always reported
    while True:
        events = poller.poll()
        if any(fd == guard.fileno() for fd, _ in events):
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
            os._exit(1)
        os.read(wake, 1 << 10)
        if (status := collect(child)) is not None:
            guard.send(ENDED + str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)


def keep_only(kept: Sequence[int]) -> None:
    """Close every descriptor but these."""
    low = 0
    for fd in sorted(kept):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, MAX_FD)


def collect(child: int) -> int | None:
    """Reap every process that has ended. Return the status of `child` if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    return status


def become_interpreter(state: TemplateState, session: SessionOptions, fds: Sequence[int]) -> None:
    """Confine this process and run untrusted code in it; it never returns."""
    try:
        prefer_to_kill(state.proc)
        ours = [*fds[:GUARD], *fds[GUARD + 1 :]]
        guard = move(ours, fds[GUARD])
        os.closerange(guard + 1, MAX_FD)
        os.closerange(len(ours), guard)
        confine(state.options, session, state.used_bytes, state.readable)
        os.environ.clear()
        os.environ.update(ENVIRONMENT, HOME=session.folder, TMPDIR=session.folder)
    except BaseException as error:
        with suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    interpreter.main(guard)
    os._exit(1)


def prefer_to_kill(proc: int) -> None:
    """Let the kernel kill this process first when the machine is out of memory."""
    with suppress(OSError):
        fd = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc)
        os.write(fd, b"1000")
        os.close(fd)


def move(fds: Sequence[int], last: int) -> int:
    """Give `fds` the numbers 0, 1, 2, ... and return a copy of `last` above them."""
    above = max(*fds, last, len(fds)) + 1
    high = [os.dup2(fd, above + index) for index, fd in enumerate([*fds, last])]
    for index in range(len(fds)):
        os.dup2(high[index], index)
    return high[-1]


def run_here() -> None:
    """Be the launcher: `session.Template` starts a process with this function, its arguments in `sys.argv`."""
    del sys.path[0]  # of the suite's sources, which nobody needs inside
    main(int(sys.argv[1]), sys.argv[2])
