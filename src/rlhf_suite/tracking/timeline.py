"""Who was busy when: engines, rewards, trainer and driver. `timeline.jsonl` has a line for each interval."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Span = tuple[float, float]  # begin and end, in seconds


@dataclass
class Interval:
    """A time in which someone was busy with one thing."""

    who: str
    what: str
    begin: float  # seconds since the epoch
    end: float | None = None  # None: it is still busy


class Timeline:
    """Intervals of any thread, and the shares of time of the last step."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.intervals: list[Interval] = []  # that were not over when the window began
        self.window_begin = time.time()

    @contextmanager
    def busy(self, who: str, what: str) -> Iterator[None]:
        """Record the time of the block."""
        interval = Interval(who, what, time.time())
        with self.lock:
            self.intervals.append(interval)
        try:
            yield
        finally:
            interval.end = time.time()

    def close_window(self, file: Path) -> dict[str, float]:
        """Begin a new window, write the intervals that are over, and return shares of the old window: the idle time of
        engines and trainer, and `perf/overlap`, the time in which both were busy, of the time of the less busy one."""
        with self.lock:
            intervals, now = self.intervals, time.time()
            self.intervals = [each for each in intervals if each.end is None]
        over = [each for each in intervals if each.end is not None]
        with file.open("a") as out:
            out.writelines(json.dumps(vars(each)) + "\n" for each in over)
        begin, self.window_begin = self.window_begin, now
        engines, trainer = (
            merged([(max(each.begin, begin), each.end or now) for each in intervals if each.who == who])
            for who in ("engines", "trainer")
        )
        window, both = max(now - begin, 1e-9), overlap(engines, trainer)
        least = min(length(engines), length(trainer))
        return {
            "perf/engine_idle": 1 - length(engines) / window,
            "perf/trainer_idle": 1 - length(trainer) / window,
            "perf/overlap": both / least if least else 0.0,
        }


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return the union of spans as spans that do not touch, in order."""
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def length(spans: Sequence[Span]) -> float:
    """Return the total length of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Return the length of what two unions of spans have in common."""
    return length(first) + length(second) - length(merged([*first, *second]))
