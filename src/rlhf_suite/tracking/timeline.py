"""Who was busy when: engines, environments, rewards, trainer and driver. `timeline.jsonl` has a line for each interval.

The intervals of the driver are its waits and what it does meanwhile: it waits for a rollout, syncs weights, saves.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

Span = tuple[float, float]  # begin and end, in seconds
KEPT = 100_000  # intervals that are not written yet, so that a task that never writes them does not fill the memory
PAUSE_S = 0.01  # a shorter pause does not end an interval of an activity


@dataclass
class Interval:
    """A time in which someone was busy with one thing."""

    who: str
    what: str
    begin: float  # seconds since the epoch
    end: float | None = None  # None: it is still busy


class Timeline:
    """Intervals of any thread, and the shares of time of the last step. `others` are called before a window is closed:
    they add the intervals of other processes until then."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.intervals = deque[Interval](maxlen=KEPT)  # that were not over when the window began
        self.window_begin = time.time()
        self.others: list[Callable[[], None]] = []

    def open_window(self) -> None:
        """Begin the first window: the loading of models and the time in which a run was stopped are not part of it."""
        with self.lock:
            self.window_begin = time.time()

    @contextmanager
    def busy(self, who: str, activity: str) -> Iterator[None]:
        """Record the time of the block."""
        interval = Interval(who, activity, time.time())
        with self.lock:
            self.intervals.append(interval)
        try:
            yield
        finally:
            interval.end = time.time()

    def close_window(self, file: Path) -> dict[str, float]:
        """Begin a new window, write the intervals that are over, and return shares of the old window: the idle time of
        engines and trainer, and `perf/overlap`, the time in which both were busy, of the time of the less busy
        one; without it where one of them did nothing."""
        for bring in self.others:
            bring()
        with self.lock:
            intervals, now = self.intervals, time.time()
            self.intervals = deque((interval for interval in intervals if interval.end is None), KEPT)
        append(file, [interval for interval in intervals if interval.end is not None])
        begin, self.window_begin = self.window_begin, now
        recent = [interval for interval in intervals if (interval.end or now) > begin]
        engines, trainer = (
            merge_spans(
                [(max(interval.begin, begin), interval.end or now) for interval in recent if interval.who == who]
            )
            for who in ("engines", "trainer")
        )
        window, both = max(now - begin, 1e-9), overlap(engines, trainer)
        least = min(length(engines), length(trainer))
        shares = {"perf/engine_idle": 1 - length(engines) / window, "perf/trainer_idle": 1 - length(trainer) / window}
        return shares | ({"perf/overlap": both / least} if least else {})

    def add(self, intervals: Sequence[Interval]) -> None:
        """Add intervals of another process."""
        with self.lock:
            self.intervals.extend(intervals)

    def drain(self) -> list[Interval]:
        """Return and forget all intervals until now. Those that are not over begin again now."""
        with self.lock:
            now = self.window_begin = time.time()  # what has ended is not continued
            taken = [replace(interval, end=interval.end or now) for interval in self.intervals]
            self.intervals = deque((interval for interval in self.intervals if interval.end is None), KEPT)
            for interval in self.intervals:
                interval.begin = now
        return taken

    def close(self, file: Path) -> None:
        """Write what is left when a run ends: intervals since the last window, and those that are not over, until
        now."""
        with self.lock:
            now, intervals, self.intervals = time.time(), self.intervals, deque(maxlen=KEPT)
        append(file, [replace(interval, end=interval.end or now) for interval in intervals])


class Activity:
    """Something that may happen several times at once. There is an interval while it happens at least once."""

    def __init__(self, timeline: Timeline, who: str, activity: str) -> None:
        self.timeline, self.who, self.what = timeline, who, activity
        self.count = 0
        self.interval: Interval | None = None

    def begin(self) -> None:
        """Record that it happens once more."""
        with self.timeline.lock:
            self.count += 1
            if self.count != 1:
                return
            now, last = time.time(), self.interval
            if last is not None and last.end is not None and last.end > max(now - PAUSE_S, self.timeline.window_begin):
                last.end = None
            else:
                self.interval = Interval(self.who, self.what, now)
                self.timeline.intervals.append(self.interval)

    def end(self) -> None:
        """Record that it happens once less."""
        with self.timeline.lock:
            self.count -= 1
            if self.count == 0 and self.interval is not None:
                self.interval.end = time.time()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


def append(file: Path, intervals: Sequence[Interval]) -> None:
    """Write a line for each interval."""
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(vars(interval)) + "\n" for interval in intervals)


def merge_spans(spans: Sequence[Span]) -> list[Span]:
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
    return length(first) + length(second) - length(merge_spans([*first, *second]))
