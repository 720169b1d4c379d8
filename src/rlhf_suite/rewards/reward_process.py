"""Run reward code in a process that can be killed, so that each row gets an outcome in bounded time whatever it does.

A user's file gets the whole batch. If that fails (exception, crash, deadline), its rows are scored one at a time, so
that one bad row does not fail the others. A rule gets rows one at a time from the start, in several processes
(`ParallelScorer`), each of which takes the next row when it has ended one. A row that is killed loses its process, and
a new one takes the next row.

Every row has a limit of its own (`RowLimit`), which no other row uses up:

- of a rule of the suite that may not end (need `time_limit`): a thirtieth of `reward.timeout_s` of computing, whatever
  the machine does besides, and five times as long by the clock. A response that reaches it is wrong, not a failure;
- of the rule `code`: programs have limits of their own in there; this one is for a jail that does not work;
- of a file, or another rule of the user: `reward.timeout_s`, or a thirtieth of it where 30 rows or more wait. A row
  that reaches it is a failure. If no row has a score when rows and restarts have taken twice `reward.timeout_s`, the
  code does not work, and the rest of the batch is given up.

So a batch of n rows in p processes ends after at most n / p limits and restarts, and that of a file after
`reward.timeout_s` more.

A process that is killed from outside (by the kernel when memory is short, or by a scheduler) is started again for the
same rows.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rlhf_suite.background import together
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.machine_limits import cpu_count
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import Choice, Outcome, RewardFailure, Sample, Scored
from rlhf_suite.rewards.child import RewardProcess, StartError, append_to_log
from rlhf_suite.waits import waiting

PATIENCE = 2  # times reward.timeout_s: the limits of a few rows together, and as much for restarts
SHARE = 30  # a row's limit is at least a thirtieth of reward.timeout_s
CLOCK = 5  # times the limit of computing is a row's limit by the clock: others use the cores too
MAX_PROCESSES = 8
ROWS_PER_PROCESS = 32  # fewer are not worth another process
MAX_RESTARTS = 3  # of a process that was killed from outside, for one request
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR2)
TOO_LONG = (signal.SIGPROF, signal.SIGALRM)  # of the timers of a row that may compute, or take, only so long
GRACE_S = 5.0  # after which the timers did not work
TIMED_OUT, UNREADABLE = "timed_out", "unreadable"  # metrics of rules that may not end
SHOWN = 200  # characters of a response, in the log


@dataclass(frozen=True)
class RowLimit:
    """What one row may take.

    Args:
        clock_s: seconds by the clock.
        cpu_s: seconds of computing, where that is limited.
        is_wrong: a row beyond the limit, or whose process crashes, is a wrong answer (0) and not a failure.
    """

    clock_s: float
    cpu_s: float | None = None
    is_wrong: bool = False


def row_limit(config: RewardConfig, count: int) -> RowLimit:
    """Return the limit of each of `count` rows that are scored one at a time."""
    if config.rule is not None and reward_rule.needs(config.rule, "time_limit"):
        cpu_s = config.timeout_s / SHARE
        return RowLimit(CLOCK * cpu_s, cpu_s, is_wrong=True)
    if config.rule is not None and reward_rule.needs(config.rule, "tests"):
        return RowLimit(config.rules.code_timeout_s + config.timeout_s)
    return RowLimit(config.timeout_s / min(max(count, 1), SHARE))


class IsolatedScorer:
    """Score rows by `reward.rule` or by the file `reward.remote_url`, in one process that is started once and
    reused.
    """

    def __init__(self, config: RewardConfig, log: Path) -> None:
        """Start the process, whose output goes to the file `log`.

        Raises:
            UserError: the rule or the file cannot be loaded.
        """
        assert (config.rule is None) != (config.remote_url is None), "one of rule and remote_url"
        self.config, self.timeout_s, self.log = config, config.timeout_s, log
        self.takes_batches = config.rule is None
        kind, name = ("rule", config.rule) if config.rule else ("file", str(config.remote_url))
        choice = Choice(config.reward_key, config.combine)
        self.source = (kind, name, json.dumps(asdict(config.rules)), json.dumps(asdict(choice)))
        if self.takes_batches and not Path(self.source[1]).is_file():
            raise UserError(f"reward.remote_url={config.remote_url}: no such file; give a .py file with reward_func")
        self.process: RewardProcess | None = None
        self.is_closed = False  # nothing is started again
        try:
            self._start()
        except StartError as error:
            flag = f"reward.rule={config.rule}" if config.rule else f"reward.remote_url={config.remote_url}"
            raise UserError(f"{flag} cannot be used: {error}") from None

    def score(self, rows: list[Sample]) -> list[Outcome]:
        """Return one outcome per row, in the order of `rows`."""
        if self.takes_batches and len(rows) > 1:
            result = self._call(rows, RowLimit(self.timeout_s))
            if not isinstance(result, RewardFailure):
                return result
        return score_one_by_one([self], rows)

    def close(self) -> None:
        """Kill the reward process and its children, for good: a call that is under way ends with an error."""
        self.is_closed = True
        self._kill()

    def _kill(self) -> None:
        """Kill the reward process and its children. The next row has another one."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()

    def _start(self) -> None:
        """Start the reward process. Raise StartError if that fails, or RunError after `close`."""
        self.process = process = RewardProcess(self.source, self.log)
        try:
            if self.is_closed:
                raise StartError("the run has ended")
            process.wait_until_ready()
        except StartError as error:
            self._kill()
            process.kill()
            if self.is_closed:
                raise RunError("the run has ended") from error
            raise

    def score_row(self, row: Sample, limit: RowLimit) -> Outcome:
        """Return the outcome of one row."""
        result = self._problem_to_start() or self._call([row], limit)
        outcome = result if isinstance(result, RewardFailure) else result[0]
        if not limit.is_wrong:
            return outcome
        if isinstance(outcome, Scored):
            return replace(outcome, extra=outcome.extra | {TIMED_OUT: 0.0})
        if isinstance(outcome, TimedOut | Crashed):
            self._write(f"{outcome.reason}; it is worth 0: {printable(row.response[-SHOWN:])}")
            why = {TIMED_OUT: 1.0} if isinstance(outcome, TimedOut) else {TIMED_OUT: 0.0, UNREADABLE: 1.0}
            return Scored(0.0, 0.0, why, outcome.retries)
        return outcome

    def _write(self, line: str) -> None:
        append_to_log(self.log, f"[{line}]\n")

    def _timeout(self, limit: RowLimit) -> TimedOut:
        """Return a time-out: of a part of `reward.timeout_s` where rows share it."""
        reason = f"no score within reward.timeout_s={self.timeout_s:g} seconds"
        if limit.clock_s < self.timeout_s:
            reason += f"; this row alone had {limit.cpu_s or limit.clock_s:.2g} of them"
        return TimedOut(reason, "timeout")

    def _describe_end(self, code: int | None, reason: str, limit: RowLimit) -> RewardFailure:
        """Return the failure of rows whose process ended, with its exit code: minus the signal that ended it."""
        if code is not None and -code in TOO_LONG:
            return self._timeout(limit)
        return (Killed if code is not None and -code in FROM_OUTSIDE else Crashed)(reason, "error")

    def _problem_to_start(self) -> RewardFailure | None:
        """Start the process if there is none. Return None, or the failure if it does not start."""
        try:
            if self.process is None:
                self._start()
        except StartError as error:
            return NotStarted(str(error), "error")
        return None

    def _call(self, rows: list[Sample], limit: RowLimit) -> list[Outcome] | RewardFailure:
        """Return the outcomes of one request, or its failure, after which the process may have ended.

        A process that is killed from outside is started again, up to `MAX_RESTARTS` times within the same time limit.
        """
        deadline = time.monotonic() + limit.clock_s
        result: list[Outcome] | RewardFailure | None = None
        for restarts in range(MAX_RESTARTS + 1):
            left = deadline - time.monotonic() if restarts else limit.clock_s
            if result is not None and left <= 0:
                return result
            result = self._problem_to_start() or self._request(rows, replace(limit, clock_s=left))
            if not isinstance(result, RewardFailure):
                return [replace(outcome, retries=outcome.retries + restarts) for outcome in result]
            if not isinstance(result, Killed):
                return result
        assert isinstance(result, Killed)
        return RewardFailure(f"{result.reason}, {MAX_RESTARTS + 1} times in a row", result.kind, MAX_RESTARTS)

    def _request(self, rows: list[Sample], limit: RowLimit) -> list[Outcome] | RewardFailure:
        """Send the rows once. Return the outcomes, or the failure."""
        process = self.process
        if self.is_closed or process is None:
            raise RunError("the run has ended")
        message = {"rows": [row.text() for row in rows], "limit_s": limit.clock_s, "cpu_s": limit.cpu_s}
        limit_s = limit.clock_s + (0.0 if limit.cpu_s is None else GRACE_S)
        activity = f"{len(rows)} rows by reward.{self.source[0]} {self.source[1]}"
        try:
            with waiting(activity, [process.name], limit_s, "reward.timeout_s", alike=process.name):
                reply = process.request(message, limit_s)
        except TimeoutError:
            self._kill()
            return self._timeout(limit)
        except (OSError, ValueError) as broken:  # the connection to the process broke, or `close` ended it
            if self.is_closed:
                raise RunError("the run has ended") from broken
            failure = self._describe_end(process.exit_code(), process.exit_reason(), limit)
            self._kill()
            return failure
        if "died" in reply:  # the copy of the process that had the row
            return self._describe_end(reply["died"], process.reason_of(reply["died"]), limit)
        if "error" in reply:
            return RewardFailure(reply["error"], "error")
        return [RewardFailure(**one) if "reason" in one else Scored(**one) for one in reply["outcomes"]]


def score_one_by_one(scorers: Sequence[IsolatedScorer], rows: Sequence[Sample]) -> list[Outcome]:
    """Return one outcome per row. Each process takes the next row when it has ended one."""
    first = scorers[0]
    limit, work = row_limit(first.config, len(rows)), Work(len(rows), PATIENCE * first.timeout_s)

    def take(scorer: IsolatedScorer) -> None:
        while (index := next(work.order, None)) is not None:
            began = time.monotonic()
            outcome = work.find_stop_reason() or scorer.score_row(rows[index], limit)
            work.outcomes[index] = outcome
            work.count(outcome, time.monotonic() - began)

    together("rewards", [partial(take, scorer) for scorer in scorers])
    return [work.outcomes[index] for index in range(len(rows))]


class Work:
    """The rows that are still to be scored one at a time, and whether the code works at all.

    Many rows are taken in a scattered order: where those beside each other hang, others show that the code works.
    """

    def __init__(self, count: int, patience_s: float) -> None:
        order = list(range(count))
        if count > SHARE:  # fewer cannot use the patience up
            random.Random(count).shuffle(order)
        self.order, self.outcomes = iter(order), dict[int, Outcome]()
        self.patience_s, self.lost_s, self.works = patience_s, 0.0, False
        self.problem: RewardFailure | None = None

    def count(self, outcome: Outcome, seconds: float) -> None:
        """Count what a row came to: the time that is lost while no row has a score."""
        self.works |= isinstance(outcome, Scored)
        self.lost_s += seconds
        if isinstance(outcome, NotStarted):
            self.problem = outcome

    def find_stop_reason(self) -> RewardFailure | None:
        """Return why no further row is tried, None if one is."""
        if self.problem is not None or self.works or self.lost_s <= self.patience_s:
            return self.problem
        tried = f"no row got a score within {self.patience_s:g} seconds of trying each (twice reward.timeout_s)"
        return RewardFailure(f"not scored: {tried}", "timeout")


class ParallelScorer:
    """Score rows by a rule in several processes at the same time. A row's outcome depends on no other row."""

    def __init__(self, config: RewardConfig, log: Path) -> None:
        """Start the first process; the others start with the first call that has rows for them.

        Raises:
            UserError: the rule cannot be loaded.
        """
        self.config, self.log, self.is_closed = config, log, False
        self.scorers = [IsolatedScorer(config, log)]
        self.limit = config.num_processes or min(cpu_count(), MAX_PROCESSES)

    def score(self, rows: list[Sample]) -> list[Outcome]:
        """Return one outcome per row, in the order of `rows`."""
        count = max(1, min(self.limit, len(rows) // ROWS_PER_PROCESS))
        together("rewards", [self._open] * (count - len(self.scorers)))
        return score_one_by_one(self.scorers[:count], rows)

    def _open(self) -> None:
        """Start another process."""
        scorer = IsolatedScorer(self.config, self.log)
        self.scorers.append(scorer)
        if self.is_closed:
            scorer.close()

    def close(self) -> None:
        """Kill the processes and their children, for good."""
        self.is_closed = True
        for scorer in self.scorers:
            scorer.close()


@dataclass(frozen=True)
class TimedOut(RewardFailure):
    """The row took longer than it may."""


@dataclass(frozen=True)
class Crashed(RewardFailure):
    """The row ended the process, or broke the connection to it."""


@dataclass(frozen=True)
class NotStarted(RewardFailure):
    """The process does not start."""


@dataclass(frozen=True)
class Killed(RewardFailure):
    """The process was killed from outside, so the next process may well score the same rows."""
