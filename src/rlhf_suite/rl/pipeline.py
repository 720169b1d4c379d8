"""The story of reinforcement learning, one step at a time. Read this first.

roll out (sample, score, filter, shape) -> make experience -> assign credit -> update -> sync weights -> log; then
evaluate and save, as every training run does (`train.loop`). Every step is a call of one module beside this file and
returns its metrics.

An asynchronous run is the same story. Only what happens between the calls differs: tasks beside this thread
(`rl/rollout_tasks.py`) have begun the rollout earlier, weights reach the engines while the next step trains
(`rl/engine_update.py`), and so may an evaluation of them go on. docs/design.md lists all tasks and threads.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlhf_suite.algo.correction import select_masked
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.data.batch import require_column
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.benchmarks import Measure
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.engine_update import EngineUpdate
from rlhf_suite.rl.experience import ExperienceMaker
from rlhf_suite.rl.replay import NoEngines, Replay
from rlhf_suite.rl.rollout_file import SampleFiles, forget_after, write_rollouts
from rlhf_suite.rl.rollout_tasks import Rollouts
from rlhf_suite.rl.sample_table import columns
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.rl.update import Updater
from rlhf_suite.train.loop import TrainingLoop
from rlhf_suite.waits import result

EVALUATION = "evaluation"  # the thread of one
CLOSING_S = 10.0  # how long the end of a run waits for threads: engines and rewards answer nothing by then


@dataclass(kw_only=True)
class Pipeline(TrainingLoop):
    """The parts of a run, put together by build.py, and what its loop does with them."""

    rollouts: Rollouts | Replay  # prompts -> trajectories, by the engines -> rewards, filtered and shaped
    experience: ExperienceMaker  # log-probs of policy and reference, values
    credit: CreditAssigner  # rewards -> advantages and returns
    updater: Updater  # optimiser steps of policy and critic
    engines: EngineUpdate | NoEngines  # weights -> engines, attested
    evaluator: Measure | None  # pass@k on held-out prompts and benchmarks; None: there are no engines
    saves_value_network: bool  # whether the critic is written at the end too
    loop: LoopThread | None  # of what goes on beside the steps; None: there are no engines
    overlaps_evaluation: bool  # whether the next step trains meanwhile
    rewards: Rewards | None  # None: nobody scores
    files: SampleFiles  # of rollouts and evaluations, written while the run goes on
    newest: ScoredTrajectories | None = None  # the rollout of the newest step, where a callback wants its samples
    under_evaluation: tuple[int, Future[dict[str, float]]] | None = None  # a step, and the metrics to come

    def run(self) -> dict[str, float]:
        """Train to the end; return the last value of every metric."""
        try:
            return super().run()
        finally:
            self.close()

    def close(self) -> None:
        """End what is under way: rewards and engines first, and with these all tasks of the loop; then the threads of
        the loop, which wait for one of them."""
        if self.rewards is not None:
            self.rewards.close()
        self.engines.close()
        self.files.close()
        if self.loop is not None:
            self.loop.join_threads(CLOSING_S)
        with suppress(OSError):  # such as that of a full disk, which must not hide how the run ended
            self.journal.timeline.close(self.journal.folder.timeline)

    def begin(self, start: int) -> None:
        """Remove what later steps wrote before a kill, and bring the weights to the engines."""
        for folder in (self.journal.folder.rollouts, self.journal.folder.evaluations):
            forget_after(folder, start)
        self.engines.first(version=start)

    def train_step(self, step: int) -> None:
        """Train on one rollout (0-based)."""
        journal = self.journal
        scored, metrics = self.rollouts.take(step)
        with journal.phase("make_experience", "trainer"):
            experience, experience_metrics = self.experience.make(scored, version=step)
            experience, credit_metrics = self.credit.assign(experience, scored.extra)
        with journal.phase("ppo_train", "trainer"):
            update_metrics = self.updater.update(experience, step, self.credit.kl_coef)
            self.credit.adapt(credit_metrics, experience.num_episodes)
        if self.engines.beside is not None:
            with journal.phase("waiting_for_sync"):
                self.finish_sync()
            with journal.phase("waiting_for_evaluation"):
                self.finish_evaluation()
        sync_metrics = self.engines.start(step + 1, experience)
        metrics |= experience_metrics | credit_metrics | update_metrics | sync_metrics
        metrics |= staleness(experience, step) | journal.timeline.close_window(journal.folder.timeline)
        metrics["train/tokens"] = float(experience.num_tokens)
        metrics["perf/tokens_per_s"] = experience.num_tokens / sum(journal.seconds.values())
        self.log(step + 1, metrics)
        self.newest = scored if self.callbacks.has("on_step") else None
        self.files.write(partial(write_rollouts, journal.folder.rollouts, step + 1, scored, experience))

    def samples(self) -> Any:
        return None if self.newest is None else pa.table(columns(self.newest))

    def finish_step(self) -> dict[str, float]:
        """Wait until the engines have the weights of the newest step and have evaluated them, and its files are
        written; return its metrics."""
        self.finish_sync()
        self.finish_evaluation()
        self.files.finish()
        return self.row

    def finish_sync(self) -> None:
        """Wait until the newest weights are proven, and log the metrics of their sync."""
        if metrics := self.engines.finish():
            self.log_late(self.engines.version, metrics)

    def finish_evaluation(self) -> None:
        """Wait for the evaluation under way, and log its metrics."""
        if self.under_evaluation is None:
            return
        (step, outcome), self.under_evaluation = self.under_evaluation, None
        metrics = result(outcome, f"the evaluation after step {step}", EVALUATION)
        self.log_late(step, metrics, always=True)
        self.callbacks.evaluation(step, metrics)
        self.saver.is_best(metrics)  # for the record of the best evaluation: no checkpoint depends on it

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate as other runs do, or start an evaluation that goes on while the next step trains: the weights of
        that step reach the engines after it."""
        if not (self.overlaps_evaluation and self.is_evaluated(step) and 0 < step < self.total_steps):
            return super().evaluate(step)
        self.finish_step()
        assert self.loop is not None
        self.under_evaluation = (
            step,
            self.loop.task(self.loop.run_blocking(EVALUATION, partial(self.measure_beside, step))),
        )
        return {}

    def measure_beside(self, step: int) -> dict[str, float]:
        """Evaluate while the next step trains."""
        with self.journal.background("evaluation", "evaluation"):
            return self.measure(step)

    @property
    def steps_between_evaluations(self) -> int:
        """eval.steps, else all of them: then only the first and the last weights are evaluated; 0 without held-out
        prompts."""
        if self.evaluator is None:
            return 0
        return self.evaluation.steps if self.evaluation.steps > 0 else self.total_steps

    def measure(self, step: int) -> dict[str, float]:
        """Return pass@k and the like on the held-out prompts."""
        assert self.evaluator is not None
        return self.evaluator.evaluate(step)

    @property
    def exported(self) -> tuple[str, ...]:
        """The policy, and the critic if it is asked for."""
        return tuple(model for model in self.saver.groups if model == "actor" or self.saves_value_network)


def staleness(experience: Experience, version: int) -> dict[str, float]:
    """Return the mean version of the weights that wrote the tokens, by how many versions they are older than those that
    are trained, `version`, and how many versions wrote a ledger, on average; nothing where the model wrote no token.

    Raises AssertionError for tokens of newer weights, which cannot be.
    """
    versions = select_masked(require_column(experience.weight_version, "weight_version"), experience.mask).numpy()
    if not len(versions):
        return {}
    oldest, newest, mean = int(versions.min()), int(versions.max()), float(versions.mean())
    assert newest <= version, f"tokens of version {newest} in step {version}"
    return {
        "rollout/weight_version": mean,
        "async/staleness_mean": version - mean,
        "async/staleness_max": float(version - oldest),
        "async/versions_per_ledger": versions_per_ledger(versions, experience),
    }


def versions_per_ledger(versions: NDArray[np.int32], experience: Experience) -> float:
    """Return how many versions of the weights wrote a ledger, on average; `versions`: of the N masked tokens, [N]."""
    changes = np.flatnonzero(np.diff(versions)) + 1  # tokens of another version than the one before
    written = np.add.reduceat(experience.mask.numpy(), experience.starts.numpy())
    written = written[written > 0].astype(np.int64)  # by the model, in each ledger in which it wrote
    within = ~np.isin(changes, written.cumsum())
    return 1.0 + float(within.sum()) / len(written)


def total_steps(order: BatchOrder, train: TrainConfig) -> int:
    """Return the rollout steps of a run: its episodes, or train.max_steps if that is less."""
    steps = order.steps_per_epoch * train.num_episodes
    return min(steps, train.max_steps or steps)
