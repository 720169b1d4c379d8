"""The process of a jail in which untrusted code runs: its requests, its replies, and how it ends.

A request and a reply are frames: four bytes of length, big-endian, then JSON. The first request says what runs:

    {"program": code}                   runs as `python program.py` does, and ends with its exit code
    {"serve": code}                     runs, then answers calls of its functions (`calls.py`)
    {"check": [statement, ...]}         runs statements that call functions in another session (`calls.py`)
    {"id": n, "code": ..., "soft_s": s} a call of a session: names persist, and the next request may follow

Nothing that this process says is believed further than that it said it. This file imports nothing of the suite but
`calls`.
"""

from __future__ import annotations

import ast
import atexit
import json
import linecache
import os
import signal
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_suite.sandbox.calls import check, serve

# Descriptors of the interpreter. PEER_* lead to the other session of a program and its checks.
REQUESTS, REPLIES, PEER_ANSWERS, PEER_ASKS = 3, 4, 5, 6
PASSED = 42  # exit code of checks that ran to their end
MAX_VALUE, MAX_PROBLEM = 100_000, 10_000  # characters of a reply
FLUSH_FAILED = 120  # as Python itself


def main(said_ready: int) -> None:
    """Serve requests until the session ends. Writing to `said_ready` tells the guard that this process is confined."""
    os.write(said_ready, b"ready")
    os.close(said_ready)
    sys.argv, sys.path[:] = ["program.py"], [str(Path.cwd()), *sys.path]
    if "numpy.random" in sys.modules:  # all sessions begin as copies of one process; Python's own random knows that
        sys.modules["numpy.random"].seed()
    request = read_frame()
    if "id" in request:
        open_streams(line_buffering=True)
        answer_calls(request)
        os._exit(0)
    open_streams(line_buffering=False)
    os.closerange(REQUESTS, REPLIES + 1)
    if "program" in request:
        run_as_main(request["program"])
    sys.set_int_max_str_digits(0)
    if "serve" in request:
        finish(status_of(lambda: serve(request["serve"], PEER_ANSWERS, PEER_ASKS)))
    if status_of(lambda: check(request["check"], PEER_ANSWERS, PEER_ASKS)) is None:
        os._exit(PASSED)
    os._exit(1)


def open_streams(line_buffering: bool) -> None:
    """Make new standard streams: those of the template belong to other descriptors."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    for name, fd, errors in (("stdout", 1, "surrogateescape"), ("stderr", 2, "backslashreplace")):
        buffered = line_buffering or fd == 2
        stream = open(fd, "w", encoding="utf-8", errors=errors, closefd=False, buffering=1 if buffered else -1)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def new_main() -> types.ModuleType:
    """Return a fresh module `__main__`, under which modules such as pickle find what the code defines."""
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    return module


def run_as_main(code: str) -> None:
    """Run a program and end this process with its exit code."""
    names = new_main().__dict__
    finish(status_of(lambda: exec(compile(code, "program.py", "exec"), names)))


def status_of(action: Callable[[], object]) -> int | None:
    """Run `action`. Return None at its end, or the exit code that an exception stands for, after printing it."""
    try:
        action()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException as error:
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        return 1
    return None


def finish(status: int | None) -> None:
    """End this process as Python does, but without the time that taking the interpreter apart needs."""
    code = status or 0
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or FLUSH_FAILED
    os._exit(code)


def answer_calls(request: dict[str, Any]) -> None:
    """Answer one call after the other, until the other side closes its pipe."""
    names, owner, number = new_main().__dict__, os.getpid(), 0
    while request:
        number += 1
        reply = answer(request["code"], f"<call {number}>", request["soft_s"], names)
        if os.getpid() != owner:  # a child that the code forked and did not end
            os._exit(0)
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        write_frame({"id": request["id"]} | reply)
        request = read_frame()


def answer(code: str, name: str, soft_s: float, names: dict[str, object]) -> dict[str, object]:
    """Run the code of one call. After `soft_s` seconds it gets an exception, which leaves the names as they are."""
    is_armed, timed_out = True, False

    def out_of_time(*_: object) -> None:
        nonlocal timed_out
        if is_armed:
            timed_out = True
            raise TimeoutError("the call took too long; the names that it had defined are kept")

    signal.signal(signal.SIGALRM, out_of_time)
    value = problem = None
    try:
        signal.setitimer(signal.ITIMER_REAL, soft_s)
        try:
            value = execute(code, name, names)
        finally:
            is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        problem = describe_error(error)
    return {"value": value, "problem": problem, "timed_out": timed_out}


def execute(code: str, name: str, names: dict[str, object]) -> str | None:
    """Run statements. Return the value of the last one as text, if it is an expression whose value is not None."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for the lines of tracebacks
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    return None if value is None else repr(value)[:MAX_VALUE]


def describe_error(error: BaseException) -> str:
    """Return an exception with its traceback, without our own frames. A long text keeps both of its ends."""
    try:
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        text = "".join(traceback.format_exception(error.with_traceback(frame))).strip()
    except BaseException:  # of an exception class of the code
        text = type(error).__name__
    return text if len(text) <= MAX_PROBLEM else f"{text[: MAX_PROBLEM // 2]}\n...\n{text[-MAX_PROBLEM // 2 :]}"


def read_frame() -> dict[str, Any]:
    """Return the next request, {} when the other side has closed its pipe."""
    head = read_exactly(4)
    return json.loads(read_exactly(struct.unpack(">I", head)[0])) if len(head) == 4 else {}


def read_exactly(size: int) -> bytes:
    parts = []
    while size and (part := os.read(REQUESTS, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_frame(message: dict[str, object]) -> None:
    data = json.dumps(message).encode()
    data = struct.pack(">I", len(data)) + data
    while data:
        data = data[os.write(REPLIES, data) :]
