"""Run untrusted Python programs, each in a process that `jail.py` isolates, with a deadline."""

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
MAX_OUTPUT_BYTES = 1 << 20  # of stdout; the rest is ignored
TAIL_BYTES = 300  # of stderr, quoted in error messages
EXIT_S = 1.0  # how long a program that closed its pipe is given to end


@dataclass(frozen=True)
class Limits:
    """Limits of a program: seconds of wall time for all of its processes, and MiB of memory for each process."""

    timeout_s: float
    memory_mb: int


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended. `problem` is None when the program and its checks ran to the end."""

    stdout: str
    problem: str | None
    timed_out: bool = False


class SandboxedProcess:
    """A running program in a sandbox. Closing `stack` kills it and removes its files."""

    def __init__(self, stack: ExitStack, code: str, limits: Limits, stdin: str = "", fds: Sequence[int] = ()) -> None:
        self.secret = secrets.token_hex(16)
        payload = {
            "code": code,
            "secret": self.secret,
            "memory_bytes": limits.memory_mb << 20,
            "cpu_s": math.ceil(limits.timeout_s) + 1,
        }
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf_suite_", ignore_cleanup_errors=True))
        input_file, payload_file, output_file, error_file = (
            stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes them
            for _ in range(4)
        )
        self.output_file, self.error_file = output_file, error_file
        input_file.write(stdin.encode(errors="replace"))
        payload_file.write(json.dumps(payload).encode())
        input_file.seek(0), payload_file.seek(0)
        self.report, theirs = os.pipe()
        stack.callback(os.close, self.report)
        self.popen = subprocess.Popen(
            [sys.executable, "-I", str(JAIL), str(payload_file.fileno()), str(theirs)],
            stdin=input_file, stdout=output_file, stderr=error_file, cwd=folder,
            pass_fds=[payload_file.fileno(), theirs, *fds], start_new_session=True, env={},
        )  # fmt: skip
        stack.callback(self.kill)
        os.close(theirs)

    def ends(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds; return whether the program has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(within_s)
        return self.popen.poll() is not None

    def kill(self) -> None:
        """Kill the program and all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    @property
    def finished(self) -> bool:
        """Return whether the program ran to its end. This reads the report, so it can be read only once."""
        os.set_blocking(self.report, False)
        return read_now(self.report) == self.secret.encode()

    def failure(self) -> str:
        """Return why the program did not run to its end."""
        return failure(self.popen.returncode, self.error_file)


def run_python(code: str, stdin: str, limits: Limits) -> ProgramResult:
    """Run `code` with the text `stdin` as its input; return its output and how it ended."""
    with ExitStack() as stack:
        program = SandboxedProcess(stack, code, limits, stdin)
        if not program.ends(limits.timeout_s):
            return ProgramResult(output_text(program.output_file), timeout_message(limits), timed_out=True)
        problem = None if program.finished else program.failure()
        return ProgramResult(output_text(program.output_file), problem)


def run_checks(code: str, checks: Sequence[str], limits: Limits) -> ProgramResult:
    """Run `code`, then `checks` (statements) that use its functions.

    The checks run in a second sandbox, which the program cannot reach.
    """
    with ExitStack() as stack:
        (asked, asks), (answered, answers) = os.pipe(), os.pipe()
        text = f"{CALLS.read_text()}\nsys.set_int_max_str_digits(0)\n"
        program = SandboxedProcess(stack, f"{text}serve({code!r}, {asked}, {answers})", limits, fds=(asked, answers))
        tests = SandboxedProcess(
            stack, f"{text}check({list(checks)!r}, {answered}, {asks})", limits, fds=(answered, asks)
        )
        for fd in (asked, asks, answered, answers):  # so that the end of one process is an end of file for the other
            os.close(fd)
        if not tests.ends(limits.timeout_s):
            return ProgramResult(output_text(program.output_file), timeout_message(limits), timed_out=True)
        if tests.finished:
            return ProgramResult(output_text(program.output_file), None)
        problem = tests.failure()
        if "EOFError" in problem and program.ends(EXIT_S):
            problem = program.failure()
        return ProgramResult(output_text(program.output_file), problem)


def timeout_message(limits: Limits) -> str:
    """Return the message of a program that was killed at its deadline."""
    return f"it ran longer than {limits.timeout_s:.3g} s"


def read_now(fd: int) -> bytes:
    """Return what is in a pipe now. Do not wait for its end: a child process that lives on may hold it open."""
    with suppress(BlockingIOError):
        return os.read(fd, 1000)
    return b""


def output_text(file: IO[bytes]) -> str:
    """Return the first `MAX_OUTPUT_BYTES` of a program's output as text."""
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES).decode(errors="replace")


def failure(code: int, error_file: IO[bytes]) -> str:
    """Return why a program ended with exit code `code`, with the last line of its error output."""
    number = -code if code < 0 else code - 128
    is_signal = number in {each.value for each in signal.Signals}
    how = f"it was ended by {signal.Signals(number).name}" if is_signal else f"it ended early (exit code {code})"
    error_file.seek(max(0, error_file.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = error_file.read().decode(errors="replace").strip().splitlines()
    return f"{how}: {lines[-1]}" if lines else how
