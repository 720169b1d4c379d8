"""The optimiser steps of one rollout: which sequences each step takes, and policy and critic at the same time."""

from __future__ import annotations

import numpy as np

from rlhf_suite.config.train import RLTrainConfig
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.rl.mismatch import check_mismatch
from rlhf_suite.rl.model_groups import CriticGroup, PolicyGroup

SHUFFLE = 1  # the stream of these random numbers; 0 is that of the order of prompts (data/sampler.py)


def step_indices(num_episodes: int, batch_size: int, epochs: int, seed: tuple[int, int]) -> list[list[int]]:
    """Return the episodes of each optimiser step: a fresh shuffle per epoch; a last short batch is kept. `seed`: the
    run's, and the RL step."""
    generator = np.random.Generator(np.random.PCG64([*seed, SHUFFLE]))
    steps = []
    for _ in range(epochs):
        order = generator.permutation(num_episodes)
        steps += [order[i : i + batch_size].tolist() for i in range(0, num_episodes, batch_size)]
    return steps


class Updater:
    """Trains policy and critic on a rollout."""

    def __init__(
        self,
        config: RLTrainConfig,
        policy: PolicyGroup,
        critic: CriticGroup | None,
        *,
        steps_per_rollout: int,
        critic_warm_up: int,
        mismatch_limit: float,
    ) -> None:
        self.config, self.policy, self.critic = config, policy, critic
        self.steps_per_rollout, self.critic_warm_up = steps_per_rollout, critic_warm_up
        self.mismatch_limit = mismatch_limit

    def update(self, experience: Experience, step: int, kl_coef: float) -> dict[str, float]:
        """Take all optimiser steps on `experience`; return the mean of each metric over them, rates and norms too.

        In the first `critic.freezing_steps` RL steps the policy stays as it is: its schedule begins after them.
        """
        config = self.config
        chosen = step_indices(experience.num_episodes, config.batch_size, config.max_epochs, (config.seed, step))
        steps = [experience.ledgers_of(episodes) for episodes in chosen]
        running, what = [], f"update of step {step + 1}"
        if step >= self.critic_warm_up:
            first = (step - self.critic_warm_up) * self.steps_per_rollout
            running.append(self.policy.update(experience, steps, first, kl_coef, what))
        if self.critic is not None:
            running.append(self.critic.update(experience, steps, step * self.steps_per_rollout, what))
        metrics: dict[str, float] = {}
        for pending in running:
            metrics |= pending.result()
        if (gap := metrics.pop("train/engine_gap", None)) is not None:
            metrics["mismatch/mean"] = gap
            check_mismatch(gap, self.mismatch_limit)
        return metrics
