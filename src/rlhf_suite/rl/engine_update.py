"""When the engines get the weights of a step: before the next step begins, or while it trains.

Where rollouts are made ahead of training, the next one is there already, or is written by the weights before. So the
policy need not wait: it hands its weights over, computes its part of the probe, and trains on, while the engines load,
prove and answer. The step after this waits until that is over, and so do evaluations, checkpoints and the end of a run:
nothing is saved that weights wrote which are not proven.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from functools import partial

from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rl.rollout_tasks import Rollouts
from rlhf_suite.rl.weight_sync import WeightSync
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.waits import result

THREAD = "weights"
Measured = Callable[[str], AbstractContextManager[None]]


class EngineUpdate:
    """Brings weights to the engines and tells those who make rollouts. `beside`: the loop whose tasks do it while the
    next step trains; None: the next step waits for it."""

    def __init__(
        self, weights: WeightSync, rollouts: Rollouts, journal: Journal, beside: LoopThread | None = None
    ) -> None:
        self.weights, self.rollouts, self.journal, self.beside = weights, rollouts, journal, beside
        self.version = 0  # of the weights that are under way
        self.outcome: Future[dict[str, float]] | None = None

    def first(self, version: int) -> None:
        """Bring the first weights of a run to the engines, which write nothing before these are proven."""
        with self.journal.phase("weight_sync"):
            self.weights.sync(version)
            self.weights.check()
        self.rollouts.begin(version)

    def start(self, version: int, batch: TokenBatch) -> dict[str, float]:
        """Bring the weights `version` to the engines, as soon as the rollouts permit it, and prove it with sequences of
        `batch`; return the metrics, unless the next step trains meanwhile: then `finish` has them."""
        assert self.outcome is None, "the weights before are under way"
        self.rollouts.allow_sync(version)
        if self.beside is None:
            return self.update(version, batch, self.journal.phase)
        queued: Future[None] = Future()

        def tell(*_: object) -> None:
            with suppress(InvalidStateError):  # it was told before
                queued.set_result(None)

        work = partial(self.update, version, batch, self.journal.background, tell)
        self.version, self.outcome = version, self.beside.task(self.beside.run_blocking(THREAD, work))
        self.outcome.add_done_callback(tell)  # nobody asks the policy if something has failed before
        result(queued, f"the policy to be asked for the weights {version}", THREAD)
        if self.outcome.done() and (error := self.outcome.exception()) is not None:
            raise error
        return {}

    def update(
        self, version: int, batch: TokenBatch, measured: Measured, queued: Callable[[], object] = lambda: None
    ) -> dict[str, float]:
        """Send the weights, and let the engines write with them while they are probed."""
        with measured("weight_sync"):
            metrics = self.weights.sync(version, batch, queued)
        self.rollouts.note_sync(version)
        with measured("probe"):
            return metrics | self.weights.check()

    def finish(self) -> dict[str, float]:
        """Wait until the weights under way are proven, and return the metrics; none if there are no such weights."""
        if self.outcome is None:
            return {}
        outcome, self.outcome = self.outcome, None
        return result(outcome, f"the sync of the weights {self.version}", THREAD)

    def close(self) -> None:
        """Take note that the run ends. The engines answer nothing any more."""
        self.weights.close()
