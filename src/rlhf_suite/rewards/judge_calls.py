"""What the judges of a run were asked: a line for each call in `logs/judge.jsonl`, from which verdicts are taken again
and the budget is counted, also after a resume."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_suite.config.declarations.reward import JudgeConfig
from rlhf_suite.disk import name_disk_errors
from rlhf_suite.errors import RunError

FILE = "judge.jsonl"  # in the run folder's logs
REPLY = 8_000  # characters of a reply that are kept


@dataclass(frozen=True)
class Call:
    """One question to a judge. `parts` are None where there is no verdict, and `problem` says why."""

    key: str  # of the question
    tries: int = 0  # requests that were sent
    parts: Mapping[str, float] | None = None  # of each criterion, or of each answer by its number; 0 to 1
    problem: str = ""
    reply: str = ""  # the end of what the judge wrote
    tokens: int = 0
    seconds: float = 0.0


class JudgeCalls:
    """The calls of a run, also of those before it was resumed. Several threads and sources may use it."""

    def __init__(self, folder: Path, config: JudgeConfig) -> None:
        self.path, self.config, self.lock = folder / FILE, config, threading.Lock()
        self.verdicts: dict[str, Call] = {}
        self.asked = Counter[str]()  # how often each question was
        self.calls = self.tokens = 0
        for call in read_calls(self.path):
            self.calls += call.tries
            self.keep(call)

    def find(self, key: str) -> Call | None:
        """Return the call with the verdict on a question that was asked before."""
        return self.verdicts.get(key)

    def count(self, key: str) -> int:
        """Return how often a question was asked, in vain if it has no verdict."""
        return self.asked[key]

    def begin(self) -> None:
        """Count a request that is about to be sent.

        Raises:
            RunError: the budget is used up.
        """
        config = self.config
        with self.lock:
            for name, limit, used in (
                ("calls", config.max_calls, self.calls),
                ("tokens", config.max_tokens, self.tokens),
            ):
                if limit is not None and used >= limit:
                    raise RunError(
                        f"the budget of the judge is used up: {used} {name} (reward.judge.max_{name}={limit}). "
                        f"Its verdicts are kept in {self.path}: write a larger number or null, and resume the run"
                    )
            self.calls += 1

    def end(self, call: Call) -> None:
        """Write to the file what became of a question.

        Raises:
            DiskError: the file cannot be written.
        """
        with self.lock, name_disk_errors(self.path):
            self.keep(call)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="ascii") as file:
                file.write(json.dumps(asdict(call)) + "\n")

    def keep(self, call: Call) -> None:
        """Add the tokens of a question, and its verdict."""
        self.tokens += call.tokens
        self.asked[call.key] += 1
        if call.parts is not None:
            self.verdicts[call.key] = call


def read_calls(path: Path) -> list[Call]:
    """Return the calls in a file. A line that was not written to its end, because the run was killed, is left out and
    ended, so that the next one stands by itself."""
    calls = list[Call]()
    if not path.is_file():
        return calls
    text = path.read_text(encoding="ascii", errors="replace")
    if not text.endswith("\n"):
        with name_disk_errors(path), path.open("a", encoding="ascii") as file:
            file.write("\n")
    for line in text.splitlines():
        try:
            calls.append(Call(**json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            continue
    return calls


class Counts:
    """Sums over the calls of one batch of scores, for the metrics."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.lock = threading.Lock()

    def add(self, **values: float) -> None:
        """Add to the sums."""
        with self.lock:
            self.sums.update(values)

    def take(self) -> dict[str, float]:
        """Return the sums as metrics, and begin again."""
        with self.lock:
            sums, self.sums = self.sums, Counter()
        return {f"judge/{name}": float(value) for name, value in sums.items()}
