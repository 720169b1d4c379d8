"""When the rollout of each step is made, and with which weights.

Version v of the weights is what v steps have trained; step t trains version t into version t + 1. With S =
train.async_queue_size the rollout of step k is written by version max(0, k - S), whole, whatever the timing:

    rollout k begins   after the sync of version max(0, k - S), and after rollout k - 1 has ended
    version v is synced   after step v - 1, and after rollout v + S - 1 has ended

So a run is the same each time, and one that was killed continues as if nothing had happened. S = 0 is the synchronous
run.

Whatever fails, in whichever thread, ends the run: a schedule keeps the first failure, and everyone who waits for it, or
asks it for something later, raises that.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Protocol

from rlhf_suite.rl.rollout import BuilderState, RolloutBuilder
from rlhf_suite.rl.sample_table import read_samples, write_samples
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.waits import Shared

Rollout = tuple[ScoredTrajectories, dict[str, float]]  # shaped samples and metrics
CLOSING_S = 10.0  # how long the end of a run waits for a thread: engines and rewards answer nothing by then
THREAD = "rollouts"


class Schedule(Protocol):
    """What the pipeline asks for rollouts. `save` and `load` are those of a checkpoint."""

    def begin(self, step: int) -> None:
        """Start to make rollouts. The engines have the weights of `step`, the first one to be trained."""
        ...

    def take(self, step: int) -> Rollout:
        """Return the rollout of a step, whole groups."""
        ...

    def allow_sync(self, version: int) -> None:
        """Take note that the weights `version` are trained, and wait until they may be synced."""
        ...

    def synced(self, version: int) -> None:
        """Take note that the engines have the weights `version`. May be called on any thread."""
        ...

    def fail(self, error: BaseException) -> None:
        """Raise `error` in everyone who waits for rollouts, or asks for them later: something has failed beside them,
        such as a weight sync. May be called on any thread."""
        ...

    def close(self) -> None:
        """Make no further rollouts, and wait for the thread that makes them. The engines answer no more requests."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class WithTheStep:
    """What schedules have in common whose rollouts come with their steps: nothing is under way between two of them."""

    def begin(self, step: int) -> None:
        pass

    def allow_sync(self, version: int) -> None:
        pass

    def synced(self, version: int) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


class Synchronous(WithTheStep):
    """Each rollout is made when its step begins."""

    def __init__(self, builder: RolloutBuilder) -> None:
        self.builder = builder

    def take(self, step: int) -> Rollout:
        return self.builder.build(step)

    def save(self, folder: Path) -> None:
        self.builder.state.save(folder)

    def load(self, folder: Path) -> None:
        self.builder.state = BuilderState.load(folder)


class Ahead(Shared):
    """Rollouts are made in a thread of its own, `depth` steps (S) before they are trained on."""

    def __init__(self, builder: RolloutBuilder, depth: int, total_steps: int) -> None:
        super().__init__()
        self.builder, self.depth, self.total_steps = builder, depth, total_steps
        self.rollouts: dict[int, Rollout] = {}  # made and not yet taken
        self.made = 0  # rollouts that have ended
        self.state = builder.state  # of the builder, after the last of them
        self.version, self.is_closed = 0, False
        self.thread = threading.Thread()

    def begin(self, step: int) -> None:
        self.version, self.made = step, max(self.made, step)
        self.thread = threading.Thread(target=self.work, args=(self.made,), name=THREAD, daemon=True)
        self.thread.start()

    def work(self, first: int) -> None:
        """Make the rollouts from `first` on, each when its weights are there."""
        for k in range(first, self.total_steps):
            with self.changed:
                while self.version < k - self.depth and not self.is_over:
                    self.changed.wait()  # no-limit: it has nothing to do until a step is trained, which has its own
                if self.is_over:
                    return
            try:
                rollout = self.builder.build(k)
            except BaseException as error:  # whatever it is, the driver must not wait for ever
                self.fail(error)
                return
            with self.changed:
                self.state, self.made = self.builder.state.copy(), k + 1
                self.rollouts[k] = rollout
                self.changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Return whether no further rollout is needed."""
        return self.is_closed or self.failure is not None

    def take(self, step: int) -> Rollout:
        with self.builder.wait("waiting_for_rollout"), self.changed:
            self.until_made(step)
            return self.rollouts.pop(step)

    def allow_sync(self, version: int) -> None:
        last = min(version + self.depth, self.total_steps) - 1
        if last >= version:
            with self.builder.wait("waiting_to_sync"), self.changed:
                self.until_made(last)

    def until_made(self, step: int) -> None:
        """Wait until the rollout of a step has ended. The caller holds the lock."""
        self.until(lambda: True if self.made > step else None, f"the rollout of step {step + 1}", THREAD)

    def synced(self, version: int) -> None:
        with self.changed:
            self.version = version
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        if self.thread.is_alive():
            self.thread.join(CLOSING_S)

    def save(self, folder: Path) -> None:
        """Write the rollouts that are made and not yet trained on; one under way is made again from the same
        weights."""
        with self.changed:
            state, waiting = self.state, dict(self.rollouts)
        state.save(folder)
        for k, (scored, metrics) in waiting.items():
            (folder / f"rollout_{k}").mkdir()
            write_samples(folder / f"rollout_{k}", scored)
            (folder / f"rollout_{k}" / "metrics.json").write_text(json.dumps(metrics))

    def load(self, folder: Path) -> None:
        self.builder.state = self.state = BuilderState.load(folder)
        for path in folder.glob("rollout_*"):
            k = int(path.name.removeprefix("rollout_"))
            self.rollouts[k] = read_samples(path), json.loads((path / "metrics.json").read_text())
            self.made = max(self.made, k + 1)
