"""The optimiser steps of one rollout: which sequences each step takes, and policy and critic at the same time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlhf_suite.algo.entropy import AdaptiveEntropy
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.data.batch import require_column
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.losses.covariance import choose_in_band, choose_largest, covariances
from rlhf_suite.registry import policy_loss
from rlhf_suite.rl.credit import means
from rlhf_suite.rl.mismatch import check_mismatch
from rlhf_suite.rl.model_groups import CriticGroup, PolicyGroup

SHUFFLE, CHOICE = 1, 2  # streams of random numbers; 0 is that of the order of prompts (data/sampler.py)


def step_indices(num_episodes: int, batch_size: int, epochs: int, seed: tuple[int, int]) -> list[list[int]]:
    """Return the episodes of each optimiser step: a fresh shuffle per epoch; a last short batch is kept. `seed`: the
    run's, and the RL step."""
    generator = np.random.Generator(np.random.PCG64([*seed, SHUFFLE]))
    steps = []
    for _ in range(epochs):
        order = generator.permutation(num_episodes)
        steps += [order[i : i + batch_size].tolist() for i in range(0, num_episodes, batch_size)]
    return steps


def choose_tokens(batch: Experience, actor: ActorConfig, seed: tuple[int, int]) -> tuple[Experience, dict[str, float]]:
    """Return the rollout with the tokens that the policy loss treats otherwise by their covariances, and metrics. The
    draws depend on `seed`, the run's and the RL step, and on the rollout alone."""
    mask, log_probs = batch.mask, require_column(batch.old_log_probs, "old_log_probs")
    covariance = covariances(log_probs, require_column(batch.advantages, "advantages"), mask)
    if policy_loss.needs(actor.policy_loss_type, "covariance_band"):
        draw = np.random.Generator(np.random.PCG64([*seed, CHOICE]))
        chosen = choose_in_band(covariance, mask, actor.clip_cov_range, actor.clip_cov_ratio, draw)
    else:
        chosen = choose_largest(covariance, mask, actor.kl_cov_ratio)
    metrics = means({"train/covariance": covariance, "train/chosen_token_ratio": chosen.float()}, mask)
    return replace(batch, chosen=chosen), metrics


class Updater:
    """Trains policy and critic on a rollout."""

    def __init__(  # noqa: PLR0913 - both models, and how they are trained
        self,
        config: TrainConfig,
        actor: ActorConfig,
        policy: PolicyGroup,
        critic: CriticGroup | None,
        *,
        steps_per_rollout: int,
        critic_warm_up: int,
        mismatch_limit: float,
    ) -> None:
        self.config, self.actor, self.policy, self.critic = config, actor, policy, critic
        self.steps_per_rollout, self.critic_warm_up = steps_per_rollout, critic_warm_up
        self.mismatch_limit = mismatch_limit
        self.entropy: AdaptiveEntropy | None = None
        if actor.entropy_coef is not None and actor.entropy_target is not None:
            given = actor.entropy_coef, actor.entropy_target, actor.entropy_coef_step, actor.entropy_coef_max
            self.entropy = AdaptiveEntropy(*given)

    def update(self, experience: Experience, step: int, kl_coef: float) -> dict[str, float]:
        """Take all optimiser steps on `experience`; return the mean of each metric over them, rates and norms too.

        In the first `critic.freezing_steps` RL steps the policy stays as it is: its schedule begins after them.
        """
        config, metrics, seed = self.config, dict[str, float](), (self.config.seed, step)
        games = step_indices(experience.num_games, config.batch_size, config.max_epochs, seed)
        steps = [experience.ledgers_of(numbers) for numbers in games]
        if self.actor.chooses_tokens:
            experience, metrics = choose_tokens(experience, self.actor, seed)
        running, activity = [], f"update of step {step + 1}"
        if step >= self.critic_warm_up:
            first = (step - self.critic_warm_up) * self.steps_per_rollout
            entropy_coef, measured = self.steer_entropy(experience)
            metrics |= measured
            running.append(self.policy.update(experience, steps, first, kl_coef, entropy_coef, activity))
        if self.critic is not None:
            running.append(self.critic.update(experience, steps, step * self.steps_per_rollout, activity))
        for pending in running:
            metrics |= pending.result()
        if (gap := metrics.pop("train/engine_gap", None)) is not None:
            metrics["mismatch/mean"] = gap
            check_mismatch(gap, self.mismatch_limit)
        return metrics

    def steer_entropy(self, experience: Experience) -> tuple[float | None, dict[str, float]]:
        """Return the coefficient of the entropy bonus in this step, and metrics; None where it is not steered."""
        if self.entropy is None:
            return None, {}
        entropies = require_column(experience.entropies, "entropies")
        metrics = means({"train/entropy_before": entropies}, experience.mask)
        if not metrics:
            return 0.0, {}
        coef = self.entropy.update(metrics["train/entropy_before"])
        return coef, metrics | {"train/entropy_coef": coef}
