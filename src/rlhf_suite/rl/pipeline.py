"""The story of reinforcement learning, one step at a time. Read this first.

gather (sample, score, filter, shape) -> make experience -> assign credit -> update -> publish weights -> log,
evaluate, save. Every step is a call of one module beside this file and returns its metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_suite.config.runs import PPORun
from rlhf_suite.config.train import RLTrainConfig
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.launch.stop import deferred
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.evaluation import Evaluator
from rlhf_suite.rl.experience import ExperienceMaker
from rlhf_suite.rl.publish import Publisher
from rlhf_suite.rl.rollout import Gatherer
from rlhf_suite.rl.rollout_file import forget_after, write_rollouts
from rlhf_suite.rl.update import Updater
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.metrics import last_values, read_rows
from rlhf_suite.train.saving import Saver


@dataclass
class Pipeline:
    """The parts of a run, put together by wiring.py, and the loop over them."""

    config: PPORun
    order: BatchOrder  # which prompts each step takes
    gatherer: Gatherer  # prompts -> trajectories, by the engines -> rewards, filtered and shaped
    experience: ExperienceMaker  # log-probs of policy and reference, values
    credit: CreditAssigner  # rewards -> advantages and returns
    updater: Updater  # optimiser steps of policy and critic
    publisher: Publisher  # weights -> engines, attested
    evaluator: Evaluator  # pass@k on held-out prompts
    saver: Saver  # checkpoints and the final model
    journal: Journal  # metrics, timings, progress
    last: dict[str, float] = field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        """Rollout steps of the whole run."""
        return total_steps(self.order, self.config.train)

    def run(self) -> dict[str, float]:
        """Train to the end; returns the last value of every metric."""
        start = self.saver.resume(self.journal.warn)
        self.journal.begin(start, self.total_steps)
        self.last = last_values(read_rows(self.journal.folder.metrics))
        for made in (self.journal.folder.rollouts, self.journal.folder.evaluations):
            forget_after(made, start)
        with self.journal.phase("broadcast"):
            self.publisher.publish(version=start)
        if start == 0 and self.config.eval.on_start:
            self.evaluate(step=0)
        with deferred():
            for step in range(start, self.total_steps):
                if self.saver.stops_early(step, self.config.train.early_stopping_patience, self.journal.warn):
                    break
                self.train_step(step)
                evaluation = self.evaluate(step + 1)
                self.save(step + 1, evaluation)
            for model in self.saver.groups:
                if model == "actor" or self.config.critic.save_value_network:
                    self.saver.export(model)
        return self.last

    def train_step(self, step: int) -> None:
        """One rollout step (0-based)."""
        journal = self.journal
        scored, metrics = self.gatherer.gather(step)
        with journal.phase("make_experience"):
            experience, experience_metrics = self.experience.make(scored, version=step)
            experience, credit_metrics = self.credit.assign(experience)
        with journal.phase("ppo_train"):
            update_metrics = self.updater.update(experience, step, self.credit.kl_coef)
            self.credit.adapt(credit_metrics, len(experience))
        with journal.phase("broadcast"):
            publish_metrics = self.publisher.publish(version=step + 1, probe=experience)
        metrics |= experience_metrics | credit_metrics | update_metrics | publish_metrics
        metrics["train/tokens"] = float(experience.num_tokens)
        metrics["perf/tokens_per_s"] = experience.num_tokens / sum(journal.seconds.values())
        self.log(step + 1, metrics)
        write_rollouts(journal.folder.rollouts, step + 1, scored, experience)

    def evaluate(self, step: int) -> dict[str, float]:
        """Pass@k before the first step, every eval.steps and after the last."""
        every = self.config.eval.steps
        if every <= 0 or (step % every and step != self.total_steps):
            return {}
        with self.journal.phase("evaluation"):
            metrics = self.evaluator.evaluate(step)
        self.log(step, metrics, always=True)
        return metrics

    def save(self, step: int, evaluation: dict[str, float]) -> None:
        """A checkpoint every ckpt.save_steps, and of the best evaluation; the end, when a signal asks for it."""
        with self.journal.phase("save"):
            self.saver.save_if_due(step, evaluation)
            self.saver.stop_if_requested(step)

    def log(self, step: int, metrics: dict[str, float], always: bool = False) -> None:
        self.last |= metrics
        self.journal.log(step, metrics, always)


def total_steps(order: BatchOrder, train: RLTrainConfig) -> int:
    """Rollout steps of a run: its episodes, or train.max_steps if that is less."""
    steps = order.steps_per_epoch * train.num_episodes
    return min(steps, train.max_steps or steps)
