"""Run reward code in a process that can be killed, so that each row gets an outcome in bounded time whatever it does.

A user's file gets the whole batch. If that fails (exception, crash, deadline), its rows are scored one at a time, so
that one bad row does not fail the others. A rule gets rows one at a time from the start, in several processes
(`ParallelScorer`). A single row may take its share of the time that is left, or a thirtieth of `reward.timeout_s` if
that is more. After a row that was killed, a new process scores the next row.

Rows that hang take at most `reward.timeout_s` from a call of `IsolatedScorer.score`, and restarts between rows as much
again; the other rows take as long as they need.

A process that is killed from outside (by the kernel when memory is short, or by a scheduler) is started again for the
same rows.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_suite.config.reward import TextRewardConfig
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import Choice, Outcome, RewardFailure, Sample, Scored

START_S = 120.0  # limit for the imports of a reward file, which do not count against reward.timeout_s
MAX_LOG_BYTES = 1 << 20  # of the output of one process, bytes that are written to the log
TAIL_BYTES = 1000  # of the output, quoted in the reason of a crash
MAX_HANGING_ROWS = 30
MAX_PROCESSES = 8
ROWS_PER_PROCESS = 32  # fewer are not worth another process
MAX_RESTARTS = 3  # of a process that was killed from outside, for one request
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR2)


class StartError(RuntimeError):
    """The reward process did not start. The message says why."""


class IsolatedScorer:
    """Score rows by `reward.rule` or by the file `reward.remote_url`, in one process that is started once and
    reused.
    """

    def __init__(self, config: TextRewardConfig, log: Path) -> None:
        """Start the process, whose output goes to the file `log`.

        Raises:
            UserError: the rule or the file cannot be loaded.
        """
        assert (config.rule is None) != (config.remote_url is None), "one of rule and remote_url"
        self.timeout_s, self.log = config.timeout_s, log
        self.takes_batches = config.rule is None
        kind, name = ("rule", config.rule) if config.rule else ("file", str(config.remote_url))
        choice = Choice(config.reward_key, config.combine)
        self.source = (kind, name, json.dumps(asdict(config.rules)), json.dumps(asdict(choice)))
        # A single row may take this long even when others wait. A program has its own, earlier deadline.
        runs_programs = kind == "rule" and reward_rule.needs(name, "tests")
        self.least_s = config.rules.code_timeout_s + 2 if runs_programs else self.timeout_s / MAX_HANGING_ROWS
        if self.takes_batches and not Path(self.source[1]).is_file():
            raise UserError(f"reward.remote_url={config.remote_url}: no such file; give a .py file with reward_func")
        try:
            self.process: RewardProcess | None = RewardProcess(self.source, log)
        except StartError as error:
            flag = f"reward.rule={config.rule}" if config.rule else f"reward.remote_url={config.remote_url}"
            raise UserError(f"{flag} cannot be used: {error}") from None

    def score(self, rows: list[Sample]) -> list[Outcome]:
        """Return one outcome per row, in the order of `rows`."""
        if self.takes_batches and len(rows) > 1:
            result = self._call(rows, self.timeout_s)
            if not isinstance(result, RewardFailure):
                return result
        return self._one_by_one(rows)

    def close(self) -> None:
        """Kill the reward process and its children."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def _one_by_one(self, rows: list[Sample]) -> list[Outcome]:
        """Score each row by itself; rows for which no time is left get a time-out."""
        outcomes: list[Outcome] = []
        left = for_restarts = self.timeout_s
        for index, row in enumerate(rows):
            if min(left, for_restarts) <= 0:
                reason = f"not scored: the rows before it used up reward.timeout_s={self.timeout_s:g}"
                outcomes.append(RewardFailure(reason, "timeout"))
                continue
            began = time.monotonic()
            result: list[Outcome] | RewardFailure | None = self._problem_to_start()
            started = time.monotonic()
            if result is None:
                result = self._call([row], max(left / (len(rows) - index), min(left, self.least_s)))
            for_restarts -= started - began
            if isinstance(result, RewardFailure) and result.kind == "timeout":
                left -= time.monotonic() - started
            outcomes.extend([result] if isinstance(result, RewardFailure) else result)
        return outcomes

    def _timeout_reason(self, limit_s: float) -> str:
        """Return the message of a time-out after `limit_s` seconds, a part of `reward.timeout_s` where rows
        share it.
        """
        reason = f"no score within reward.timeout_s={self.timeout_s:g} seconds"
        return reason if limit_s >= self.timeout_s else f"{reason}; this row alone had {limit_s:.2g} of them"

    def _problem_to_start(self) -> RewardFailure | None:
        """Start the process if there is none. Return None, or the failure if it does not start."""
        try:
            self.process = self.process or RewardProcess(self.source, self.log)
        except StartError as error:
            return RewardFailure(str(error), "error")
        return None

    def _call(self, rows: list[Sample], limit_s: float) -> list[Outcome] | RewardFailure:
        """Return the outcomes of one request, or its failure, after which the process may have ended.

        A process that is killed from outside is started again, up to `MAX_RESTARTS` times within the same time limit.
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

    def _request(self, rows: list[Sample], limit_s: float) -> list[Outcome] | RewardFailure:
        """Send the rows once. Return the outcomes, or the failure."""
        assert self.process is not None
        try:
            reply = self.process.request({"rows": [row.text() for row in rows], "limit_s": limit_s}, limit_s)
        except TimeoutError:
            self.close()
            return RewardFailure(self._timeout_reason(limit_s), "timeout")
        except OSError:  # the connection to the process broke
            kind = Killed if self.process.was_killed() else RewardFailure
            reason = self.process.exit_reason()
            self.close()
            return kind(reason, "error")
        if "error" in reply:
            return RewardFailure(reply["error"], "error")
        return [RewardFailure(**one) if "reason" in one else Scored(**one) for one in reply["outcomes"]]


class ParallelScorer:
    """Score rows by a rule in several processes at the same time. A row's outcome depends on no other row."""

    def __init__(self, config: TextRewardConfig, log: Path) -> None:
        """Start the first process; the others start with the first call that has rows for them.

        Raises:
            UserError: the rule cannot be loaded.
        """
        self.config, self.log = config, log
        self.scorers = [IsolatedScorer(config, log)]
        self.limit = config.num_processes or min(os.cpu_count() or 1, MAX_PROCESSES)

    def score(self, rows: list[Sample]) -> list[Outcome]:
        """Return one outcome per row, in the order of `rows`."""
        count = max(1, min(self.limit, len(rows) // ROWS_PER_PROCESS))
        with ThreadPoolExecutor(count) as pool:
            if count > len(self.scorers):
                missing = range(count - len(self.scorers))
                self.scorers += pool.map(lambda _: IsolatedScorer(self.config, self.log), missing)
            shares = [*pool.map(lambda i: self.scorers[i].score(rows[i::count]), range(count))]
        return [shares[row % count][row // count] for row in range(len(rows))]

    def close(self) -> None:
        """Kill the processes and their children."""
        for scorer in self.scorers:
            scorer.close()


@dataclass(frozen=True)
class Killed(RewardFailure):
    """The process was killed from outside, so the next process may well score the same rows."""


class RewardProcess:
    """A `rewards.worker` process in its own process group, connected by a socket."""

    def __init__(self, source: tuple[str, str, str, str], log: Path) -> None:
        """Start the process and wait until it is ready; raise StartError when it fails to start."""
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
        self.output_tail, self.requests = b"", 0
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
        """Return the reply to `message`. Raise TimeoutError after `limit_s` seconds, or another OSError if it died."""
        deadline = time.monotonic() + limit_s
        self.requests += 1
        self.socket.settimeout(limit_s)
        self.socket.sendall(json.dumps(message | {"number": self.requests}).encode() + b"\n")
        self.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
        reply = self._read()
        assert reply.get("number") == self.requests, "the reply to another request"
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
        with self.log.open("ab", buffering=0) as log:
            while chunk := os.read(self.popen.stdout.fileno(), 1 << 16):
                self.output_tail = (self.output_tail + chunk)[-TAIL_BYTES:]
                if written < MAX_LOG_BYTES:
                    text = decoder.decode(chunk[: MAX_LOG_BYTES - written])
                    log.write(printable(text, len(text), keep_lines=True).encode())  # its output may contain responses
                    written += len(chunk)
                    if written >= MAX_LOG_BYTES:
                        log.write(b"\n[the reward code printed more than this; the rest is dropped]\n")

    def was_killed(self) -> bool:
        """Return whether a signal from outside ended the process. Crashes of its own end it by other signals."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return -self.popen.wait(timeout=1) in FROM_OUTSIDE
        return False

    def exit_reason(self) -> str:
        """Return how the process ended, and the last lines of its output."""
        try:
            code = self.popen.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "the reward code closed its connection to the run, or wrote into it"
        self.drain.join(timeout=1)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said = printable(self.output_tail.decode(errors="replace").strip(), keep_lines=True)
        return f"the reward process died ({how})" + (f"; it last said: {said}" if said else "")

    def kill(self) -> None:
        """Kill the whole process group and wait for the process to end."""
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended by itself
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.reader.close()
        self.socket.close()
        self.drain.join(timeout=1)
