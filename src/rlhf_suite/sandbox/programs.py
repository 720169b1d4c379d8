"""Runs untrusted Python programs: each in a process of its own behind `jail.py`, with a deadline."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

JAIL, CALLS = Path(__file__).with_name("jail.py"), Path(__file__).with_name("calls.py")
KEPT = 1 << 20  # bytes of its output that are looked at
TAIL = 300  # bytes of its errors that are told
GONE_S = 1.0  # for a program that closed its line to end


@dataclass(frozen=True)
class Limits:
    """Of a program: seconds of wall time, of all its processes, and MiB of memory, of each."""

    timeout_s: float
    memory_mb: int


@dataclass(frozen=True)
class Ran:
    """How a program ended. `problem` is None when it ran to its end, its tests included."""

    stdout: str
    problem: str | None
    timed_out: bool = False


class Jailed:
    """A program under way in a sandbox; `stack` ends it."""

    def __init__(self, stack: ExitStack, code: str, limits: Limits, stdin: str = "", fds: Sequence[int] = ()) -> None:
        self.secret = secrets.token_hex(16)
        payload = {
            "code": code,
            "secret": self.secret,
            "memory_bytes": limits.memory_mb << 20,
            "cpu_s": math.ceil(limits.timeout_s) + 1,
        }
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf_suite_", ignore_cleanup_errors=True))
        given, told, said, complained = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))  # noqa: SIM115 - the stack closes them
        self.said, self.complained = said, complained
        given.write(stdin.encode(errors="replace"))
        told.write(json.dumps(payload).encode())
        given.seek(0), told.seek(0)
        self.report, theirs = os.pipe()
        stack.callback(os.close, self.report)
        self.popen = subprocess.Popen(
            [sys.executable, "-I", str(JAIL), str(told.fileno()), str(theirs)],
            stdin=given, stdout=self.said, stderr=self.complained, cwd=folder,
            pass_fds=[told.fileno(), theirs, *fds], start_new_session=True, env={},
        )  # fmt: skip
        stack.callback(self.kill)
        os.close(theirs)

    def ends(self, within_s: float) -> bool:
        """Wait for its end."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(within_s)
        return self.popen.poll() is not None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    @property
    def finished(self) -> bool:
        """Whether it ran to its end; asked once."""
        os.set_blocking(self.report, False)
        return read_now(self.report) == self.secret.encode()

    def ending(self) -> str:
        """Why it did not."""
        return ending(self.popen.returncode, self.complained)


def run_python(code: str, stdin: str, limits: Limits) -> Ran:
    """Run `code` with `stdin`."""
    with ExitStack() as stack:
        program = Jailed(stack, code, limits, stdin)
        if not program.ends(limits.timeout_s):
            return Ran(begin(program.said), too_long(limits), timed_out=True)
        problem = None if program.finished else program.ending()
        return Ran(begin(program.said), problem)


def run_checks(code: str, checks: Sequence[str], limits: Limits) -> Ran:
    """Run `code`, then `checks` (statements) on its functions. The checks run in a sandbox of their own, which the
    program does not reach."""
    with ExitStack() as stack:
        (asked, asks), (answered, answers) = os.pipe(), os.pipe()
        text = f"{CALLS.read_text()}\nsys.set_int_max_str_digits(0)\n"
        program = Jailed(stack, f"{text}serve({code!r}, {asked}, {answers})", limits, fds=(asked, answers))
        tests = Jailed(stack, f"{text}check({list(checks)!r}, {answered}, {asks})", limits, fds=(answered, asks))
        for fd in (asked, asks, answered, answers):  # so that the end of one is an end of file for the other
            os.close(fd)
        if not tests.ends(limits.timeout_s):
            return Ran(begin(program.said), too_long(limits), timed_out=True)
        if tests.finished:
            return Ran(begin(program.said), None)
        problem = tests.ending()
        if "EOFError" in problem and program.ends(GONE_S):
            problem = program.ending()
        return Ran(begin(program.said), problem)


def too_long(limits: Limits) -> str:
    return f"it ran longer than {limits.timeout_s:.3g} s"


def read_now(fd: int) -> bytes:
    """What is in a pipe; a child that lives on may hold its other end."""
    with suppress(BlockingIOError):
        return os.read(fd, 1000)
    return b""


def begin(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(KEPT).decode(errors="replace")


def ending(code: int, complained: IO[bytes]) -> str:
    """Why a program did not run to its end."""
    number = -code if code < 0 else code - 128
    is_signal = number in {each.value for each in signal.Signals}
    how = f"it was ended by {signal.Signals(number).name}" if is_signal else f"it ended early (exit code {code})"
    complained.seek(max(0, complained.seek(0, os.SEEK_END) - TAIL))
    lines = complained.read().decode(errors="replace").strip().splitlines()
    return f"{how}: {lines[-1]}" if lines else how
