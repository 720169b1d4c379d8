"""Runs reward code in a process that can be killed: whatever it does, each row gets an outcome in bounded time.

`IsolatedScorer.score` takes at most 3 x `reward.timeout_s` plus a last restart: the batch, its rows one by one, and the
restarts in between, which take no time from the rows. A file gets the whole batch; if that fails
(exception, crash, deadline), its rows are tried one at a time, so that one bad row does not fail the others. A rule
gets rows one at a time from the start. A row alone may take its share of the time left, or a thirtieth of
`reward.timeout_s` if that is more; a killed process is started again for the next row.

A process that somebody else kills (the kernel for want of memory, a scheduler) is started again for the same rows.
"""

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_suite.config.reward import TextRewardConfig
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.base import Outcome, RewardFailure, RewardRow, Scored

START_S = 120.0  # for the imports of a reward file; they do not count against reward.timeout_s
MAX_LOG_BYTES = 1 << 20  # bytes of output of one process that reach the log
TAIL = 1000  # bytes of output told in the reason of a crash
MAX_HANGING_ROWS = 30
MAX_RESTARTS = 3  # for one request, of a process that was killed from outside
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR2)


class StartError(RuntimeError):
    """The reward process did not come up: the message says why."""


class IsolatedScorer:
    """Scores rows by `reward.rule` or the file `reward.remote_url`. One process, started once and used again."""

    def __init__(self, config: TextRewardConfig, log: Path) -> None:
        """Start the process, so that a file that cannot be loaded is named at once. What it prints goes to `log`."""
        assert (config.rule is None) != (config.remote_url is None), "one of rule and remote_url"
        self.timeout_s, self.log = config.timeout_s, log
        self.takes_batches = config.rule is None
        kind, name = ("rule", config.rule) if config.rule else ("file", str(config.remote_url))
        self.source = (kind, name, json.dumps(asdict(config.rules)))
        # a row alone may take this long, also when others wait; a program has its own deadline before it
        self.least_s = config.rules.code_timeout_s + 2 if name == "code" else self.timeout_s / MAX_HANGING_ROWS
        if self.takes_batches and not Path(self.source[1]).is_file():
            raise UserError(f"reward.remote_url={config.remote_url}: no such file; give a .py file with reward_func")
        try:
            self.process: RewardProcess | None = RewardProcess(self.source, log)
        except StartError as error:
            flag = f"reward.rule={config.rule}" if config.rule else f"reward.remote_url={config.remote_url}"
            raise UserError(f"{flag} cannot be used: {error}") from None

    def score(self, rows: list[RewardRow]) -> list[Outcome]:
        """One outcome per row, in their order."""
        if self.takes_batches and len(rows) > 1:
            result = self._call(rows, self.timeout_s)
            if not isinstance(result, RewardFailure):
                return result
        return self._one_by_one(rows)

    def close(self) -> None:
        """Kill the process and its children."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def _one_by_one(self, rows: list[RewardRow]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        left = for_restarts = self.timeout_s
        for index, row in enumerate(rows):
            if min(left, for_restarts) <= 0:
                reason = f"not scored: the rows before it took all of reward.timeout_s={self.timeout_s:g}"
                outcomes.append(RewardFailure(reason, "timeout"))
                continue
            began = time.monotonic()
            result: list[Outcome] | RewardFailure | None = self._problem_to_start()
            started = time.monotonic()
            if result is None:
                result = self._call([row], max(left / (len(rows) - index), min(left, self.least_s)))
            for_restarts, left = for_restarts - (started - began), left - (time.monotonic() - started)
            outcomes.extend([result] if isinstance(result, RewardFailure) else result)
        return outcomes

    def _too_late(self, limit_s: float) -> str:
        """The reason of a time-out after `limit_s`, which is less than the whole where rows share it."""
        reason = f"no score within reward.timeout_s={self.timeout_s:g} seconds"
        return reason if limit_s >= self.timeout_s else f"{reason}, of which this row alone had {limit_s:.2g}"

    def _problem_to_start(self) -> RewardFailure | None:
        """Have a process; else why there is none."""
        try:
            self.process = self.process or RewardProcess(self.source, self.log)
        except StartError as error:
            return RewardFailure(str(error), "error")
        return None

    def _call(self, rows: list[RewardRow], limit_s: float) -> list[Outcome] | RewardFailure:
        """The outcomes of one request, or why there are none; then the process may be gone.

        A process that is killed from outside is started again, `MAX_RESTARTS` times and within the same time limit.
        """
        deadline = time.monotonic() + limit_s
        result: list[Outcome] | RewardFailure | None = None
        for restarts in range(MAX_RESTARTS + 1):
            left = deadline - time.monotonic() if restarts else limit_s
            if result is not None and left <= 0:
                return result
            result = self._problem_to_start() or self._request(rows, left)
            if not isinstance(result, RewardFailure):
                return [replace(outcome, retries=outcome.retries + restarts) for outcome in result]
            if not isinstance(result, Killed):
                return result
        assert isinstance(result, Killed)
        return RewardFailure(f"{result.reason}, {MAX_RESTARTS + 1} times in a row", result.kind, MAX_RESTARTS)

    def _request(self, rows: list[RewardRow], limit_s: float) -> list[Outcome] | RewardFailure:
        """One attempt of `_call`."""
        assert self.process is not None
        try:
            reply = self.process.request({"rows": [asdict(row) for row in rows], "limit_s": limit_s}, limit_s)
        except TimeoutError:
            self.close()
            return RewardFailure(self._too_late(limit_s), "timeout")
        except OSError:  # the line broke
            kind = Killed if self.process.was_killed() else RewardFailure
            reason = self.process.exit_reason()
            self.close()
            return kind(reason, "error")
        if "error" in reply:
            return RewardFailure(reply["error"], "error")
        return [RewardFailure(**one) if "reason" in one else Scored(**one) for one in reply["outcomes"]]


@dataclass(frozen=True)
class Killed(RewardFailure):
    """The process was killed from outside: the same rows may well be scored by the next one."""


class RewardProcess:
    """`rewards.worker` as a process group of its own, at the other end of a socket."""

    def __init__(self, source: tuple[str, str, str], log: Path) -> None:
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
            )
        self.socket = ours
        self.reader = ours.makefile("rb")
        self.output_tail = b""
        self.drain = threading.Thread(target=self._drain_output, daemon=True)
        self.drain.start()
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        try:
            self.socket.settimeout(START_S)
            reply = self._read()
        except TimeoutError:
            self.kill()
            raise StartError(f"loading it took longer than {START_S:g} s") from None
        except OSError:
            reason = self.exit_reason()
            self.kill()
            raise StartError(reason) from None
        if "error" in reply:
            self.kill()
            raise StartError(reply["error"])

    def request(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The reply to `message`. TimeoutError after `limit_s`; another OSError when the process died."""
        deadline = time.monotonic() + limit_s
        self.socket.settimeout(limit_s)
        self.socket.sendall(json.dumps(message).encode() + b"\n")
        self.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self.reader.readline()
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:  # empty or cut off, or the reward code wrote into the line
            raise ConnectionError("the reward process does not answer") from None
        return reply

    def _drain_output(self) -> None:
        """Write what the reward code prints to the log, up to a limit, and keep the end of it."""
        assert self.popen.stdout is not None
        written, decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")
        with self.log.open("ab", buffering=0) as log:
            while chunk := os.read(self.popen.stdout.fileno(), 1 << 16):
                self.output_tail = (self.output_tail + chunk)[-TAIL:]
                if written < MAX_LOG_BYTES:
                    text = decoder.decode(chunk[: MAX_LOG_BYTES - written])
                    log.write(printable(text, len(text), keep_lines=True).encode())  # it may print responses
                    written += len(chunk)
                    if written >= MAX_LOG_BYTES:
                        log.write(b"\n[reward code printed more; the rest is dropped]\n")

    def was_killed(self) -> bool:
        """Whether the process ended by a signal that others send; its own mistakes end it by other signals."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return -self.popen.wait(timeout=1) in FROM_OUTSIDE
        return False

    def exit_reason(self) -> str:
        """How the process ended, and the last it said."""
        try:
            code = self.popen.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "the reward code closed its line to the run, or wrote into it"
        self.drain.join(timeout=1)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said = printable(self.output_tail.decode(errors="replace").strip(), keep_lines=True)
        return f"the reward process died ({how})" + (f"; it last said: {said}" if said else "")

    def kill(self) -> None:
        """Kill the whole group and wait for the process."""
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended by itself
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.reader.close()
        self.socket.close()
        self.drain.join(timeout=1)
