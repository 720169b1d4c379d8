"""Runs untrusted Python programs: each in a process of its own behind `jail.py`, with a deadline."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

JAIL = Path(__file__).with_name("jail.py")
KEPT = 1 << 20  # bytes of its output that are looked at
TAIL = 300  # bytes of its errors that are told


@dataclass(frozen=True)
class Ran:
    """How a program ended. `problem` is None when it ran to its end, checks included."""

    stdout: str
    problem: str | None
    timed_out: bool = False


def run_python(code: str, stdin: str, checks: Sequence[str], timeout_s: float, memory_mb: int) -> Ran:
    """Run `code` with `stdin`, then `checks` (statements) in its names, within `timeout_s` in all."""
    secret = secrets.token_hex(16)
    payload = {
        "code": code,
        "checks": list(checks),
        "secret": secret,
        "memory_bytes": memory_mb << 20,
        "cpu_s": math.ceil(timeout_s) + 1,
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf_suite_", ignore_cleanup_errors=True))
        given, said, complained, told = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        given.write(stdin.encode(errors="replace"))
        told.write(json.dumps(payload).encode())
        given.seek(0), told.seek(0)
        report, theirs = os.pipe()
        stack.callback(os.close, report)
        popen = subprocess.Popen(
            [sys.executable, "-I", str(JAIL), str(told.fileno()), str(theirs)],
            stdin=given, stdout=said, stderr=complained, cwd=folder,
            pass_fds=[told.fileno(), theirs], start_new_session=True, env={},
        )  # fmt: skip
        os.close(theirs)
        timed_out = False
        try:
            popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
        os.set_blocking(report, False)
        finished = not timed_out and read_now(report) == secret.encode()
        problem = None if finished else ending(popen.returncode, timed_out, timeout_s, complained)
        return Ran(begin(said), problem, timed_out)


def read_now(fd: int) -> bytes:
    """What is in a pipe; a child that lives on may hold its other end."""
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 1000)
    return b""


def begin(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(KEPT).decode(errors="replace")


def ending(code: int, timed_out: bool, timeout_s: float, complained: IO[bytes]) -> str:
    """Why a program did not run to its end."""
    if timed_out:
        return f"it ran longer than {timeout_s:.3g} s"
    number = -code if code < 0 else code - 128
    is_signal = number in {each.value for each in signal.Signals}
    how = f"it was ended by {signal.Signals(number).name}" if is_signal else f"it ended early (exit code {code})"
    complained.seek(max(0, complained.seek(0, os.SEEK_END) - TAIL))
    lines = complained.read().decode(errors="replace").strip().splitlines()
    return f"{how}: {lines[-1]}" if lines else how
