"""The optimiser steps of one rollout: which sequences each step takes, and policy and critic at the same time."""

from __future__ import annotations

import numpy as np

from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.batch import take
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.rl.mismatch import check_mismatch
from rlhf_suite.rl.model_groups import CriticGroup, PolicyGroup


def step_indices(num_sequences: int, batch_size: int, epochs: int, seed: tuple[int, int]) -> list[list[int]]:
    """The sequences of each optimiser step: a fresh shuffle per epoch; a last short batch is kept."""
    generator = np.random.Generator(np.random.PCG64(list(seed)))
    steps = []
    for _ in range(epochs):
        order = generator.permutation(num_sequences)
        steps += [order[i : i + batch_size].tolist() for i in range(0, num_sequences, batch_size)]
    return steps


def steps_per_rollout(config: PPORun) -> int:
    """Optimiser steps of a full rollout."""
    sequences = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return -(-sequences // config.train.batch_size) * config.train.max_epochs


def warm_up_steps(config: PPORun) -> int:
    """RL steps at the start in which the critic alone is trained."""
    return config.critic.freezing_steps if config.algo.advantage.needs("values") else 0


class Updater:
    """Trains policy and critic on a rollout."""

    def __init__(self, config: PPORun, policy: PolicyGroup, critic: CriticGroup | None) -> None:
        self.config, self.policy, self.critic = config, policy, critic

    def update(self, experience: Experience, step: int, kl_coef: float) -> dict[str, float]:
        """All optimiser steps on `experience`; each metric is the mean over them, rates and norms too.

        In the first `critic.freezing_steps` RL steps the policy stays as it is: its schedule begins after them.
        """
        train = self.config.train
        chosen = step_indices(len(experience), train.batch_size, train.max_epochs, (train.seed, step))
        batches = [take(experience, indices) for indices in chosen]
        per_rollout, warm_up = steps_per_rollout(self.config), warm_up_steps(self.config)
        running, what = [], f"update of step {step + 1}"
        if step >= warm_up:
            first = (step - warm_up) * per_rollout
            running.append(self.policy.update(batches, first, kl_coef, what))
        if self.critic is not None:
            running.append(self.critic.update(batches, step * per_rollout, what))
        metrics: dict[str, float] = {}
        for pending in running:
            metrics |= pending.result()
        if experience.old_log_probs is None:
            metrics["mismatch/mean"] = metrics.pop("train/engine_gap")
            check_mismatch(metrics["mismatch/mean"], self.config)
        return metrics
