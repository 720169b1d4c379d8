"""A process that runs reward code (`rewards.worker`), seen from the process that started it."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rlhf_suite.foreign_text import printable
from rlhf_suite.waits import RECORD

PREFIX = "reward-process-"  # of the names of the processes, as `rlhf-suite why` shows them
START_S = 120.0  # limit for the imports of a reward file, which do not count against reward.timeout_s
KILLED_S = 30.0  # for the kernel to end what was killed
MAX_LOG_BYTES = 1 << 20  # of the output of one process, bytes that are written to the log
TAIL_BYTES = 1000  # of the output, quoted in the reason of a crash


class StartError(RuntimeError):
    """The reward process did not start. The message says why."""


def append_to_log(log: Path, text: str) -> None:
    """Append a text to a log. Where the disk refuses that, as a full one does, the text is lost and scoring goes on."""
    with contextlib.suppress(OSError), log.open("ab") as file:
        file.write(text.encode())


class RewardProcess:
    """A `rewards.worker` process in its own process group, connected by a socket."""

    def __init__(self, source: tuple[str, str, str, str], log: Path) -> None:
        """Start the process; `wait_until_ready` comes next."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "rlhf_suite.rewards.worker", str(theirs.fileno()), str(os.getpid()), *source]
        with theirs:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {RECORD: str(log.parent.absolute() / PREFIX)},
            )
        self.name = f"{PREFIX}{self.popen.pid}"  # also that of its record, `<name>.json` beside the log
        self.socket = ours
        self.reader = ours.makefile("rb")
        self.output_tail, self.requests = b"", 0
        self.drain = threading.Thread(target=self._drain_output, daemon=True)
        self.drain.start()

    def wait_until_ready(self) -> None:
        """Wait until the process is ready. Raise StartError when it fails to start."""
        try:
            self.socket.settimeout(START_S)
            reply = self._read()
        except TimeoutError:
            raise StartError(f"loading it took longer than {START_S:g} s") from None
        except (OSError, ValueError):
            raise StartError(self.exit_reason()) from None
        if "error" in reply:
            raise StartError(reply["error"])

    def request(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the reply to `message`. Raise TimeoutError after `limit_s` seconds, or another OSError if it died."""
        deadline = time.monotonic() + limit_s
        self.requests += 1
        self.socket.settimeout(limit_s)
        self.socket.sendall(json.dumps(message | {"number": self.requests}).encode() + b"\n")
        self.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        reply = self._read()
        assert "died" in reply or reply.get("number") == self.requests, "the reply to another request"
        return reply

    def _read(self) -> dict[str, Any]:
        line = self.reader.readline()
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:  # empty or cut off, or the reward code wrote into the socket
            raise ConnectionError("the reward process does not answer") from None
        return reply

    def _drain_output(self) -> None:
        """Write what the reward code prints to the log, up to a limit, and keep its last bytes for error messages."""
        assert self.popen.stdout is not None
        written, decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")
        append_to_log(self.log, "")  # who looks for the log finds it, also that of code that prints nothing
        while chunk := os.read(self.popen.stdout.fileno(), 1 << 16):
            self.output_tail = (self.output_tail + chunk)[-TAIL_BYTES:]
            if written >= MAX_LOG_BYTES:
                continue
            text = decoder.decode(chunk[: MAX_LOG_BYTES - written])
            shown = printable(text, len(text), keep_lines=True)  # its output may contain responses
            written += len(chunk)
            if written >= MAX_LOG_BYTES:
                shown += "\n[the reward code printed more than this; the rest is dropped]\n"
            append_to_log(self.log, shown)

    def exit_code(self) -> int | None:
        """Return the exit code, minus the signal that ended the process, or None if the process goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(timeout=1)
        return None

    def exit_reason(self) -> str:
        """Return how the process ended, and the last lines of its output."""
        code = self.exit_code()
        if code is None:
            return "the reward code closed its connection to the run, or wrote into it"
        self.drain.join(timeout=1)
        return self.reason_of(code)

    def reason_of(self, code: int) -> str:
        """Return what an exit code says, and the last lines of the output."""
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said = printable(self.output_tail.decode(errors="replace").strip(), keep_lines=True)
        return f"the reward process died ({how})" + (f"; it last said: {said}" if said else "")

    def kill(self) -> None:
        """Kill the whole process group and wait for the process to end."""
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended by itself
            os.killpg(self.popen.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # whoever reads is woken, even if a child of the process holds its end
            self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(KILLED_S)
        self.log.with_name(f"{self.name}.json").unlink(missing_ok=True)
        self.reader.close()
        self.socket.close()
        self.drain.join(timeout=1)
