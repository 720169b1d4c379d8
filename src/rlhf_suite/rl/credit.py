"""Rewards to advantages and returns: KL penalty, estimator, teacher; and the KL controller that adapts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from rlhf_suite.algo.advantage import CreditInput, Numbers, assign_credit, clip_advantages
from rlhf_suite.algo.correction import select_masked
from rlhf_suite.algo.kl import estimate_kl, make_kl_controller
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.data.batch import TokenBatch, require_column
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.errors import UserError
from rlhf_suite.losses.reduce import masked_sum


class CreditAssigner:
    """Assigns credit to the model tokens of a rollout, over the whole of it at once."""

    def __init__(self, config: AlgoConfig) -> None:
        self.config, self.given = config, set[str]()  # numbers that samples of this run had
        self.controller = make_kl_controller(config.kl)

    @property
    def kl_coef(self) -> float:
        """The coefficient beta of the KL term in this step."""
        return self.controller.coef

    def adapt(self, metrics: dict[str, float], num_samples: int) -> None:
        """Let the controller see the step's KL, once per step."""
        if "train/kl" in metrics:
            self.controller.update(metrics["train/kl"], num_samples)

    def assign(
        self, batch: Experience, numbers: Sequence[Mapping[str, float]] = ()
    ) -> tuple[Experience, dict[str, float]]:
        """Return the batch with `advantages` and, with values, `returns`; and metrics. Estimators see model tokens, and
        of `numbers`, those that rewards and agents gave to each row, what they need.

        With a teacher every token also gets algo.distill.coef x (log p_teacher - log p_policy), a reward that no other
        token shares (discount 0): in the mean over samples the policy falls along its reverse KL to the teacher
        (Lu et al., "On-Policy Distillation", 2025).
        """
        mask = batch.mask
        kl = torch.zeros_like(mask)
        metrics: dict[str, float] = {"train/kl_coef": self.kl_coef}
        if batch.ref_log_probs is not None:
            old, reference = require_column(batch.old_log_probs, "old_log_probs"), batch.ref_log_probs
            kl = estimate_kl(old, reference, self.config.kl.estimator) * mask
            metrics |= means({"train/kl": kl, "train/logprobs_diff": old - reference}, mask)
        penalty = torch.zeros_like(kl) if self.config.kl.use_loss else kl * self.kl_coef
        values, rewards = batch.values, require_column(batch.reward, "reward")
        credit = assign_credit(self.inputs(batch, penalty, numbers), self.config.advantage)
        advantages = put_back(credit.advantages, mask)
        if batch.teacher_log_probs is not None:
            old = require_column(batch.old_log_probs, "old_log_probs")
            gap = estimate_kl(old, batch.teacher_log_probs, "k1") * mask
            advantages = advantages - self.config.distill.coef * gap
            metrics |= means({"train/teacher_kl": old - batch.teacher_log_probs}, mask)  # not clamped, as the gap is
        if (clip_range := self.config.advantage.clip_range) is not None:
            advantages, before = clip_advantages(advantages, clip_range), advantages
            metrics |= means({"train/advantage_clip_ratio": (advantages != before).float()}, mask)
        returns = None
        if values is not None:
            returns = put_back(credit.returns, mask)
            metrics |= means({"train/values": values}, mask)
        ledgers = batch.episode_sums(torch.ones_like(rewards))  # [B] of each ledger's episode
        own = rewards / ledgers - sum_per_row(penalty * mask, batch)
        metrics["train/return"] = float(own.sum() / batch.num_episodes)
        return replace(batch, advantages=advantages, returns=returns), metrics

    def inputs(self, batch: Experience, penalty: torch.Tensor, numbers: Sequence[Mapping[str, float]]) -> CreditInput:
        """Return what the estimator reads of a batch with the KL penalties [T]: model tokens alone."""
        mask, values, turns = batch.mask, batch.values, batch.turn_rewards
        rewards, is_charged = require_column(batch.reward, "reward"), batch.ref_log_probs is not None
        return CreditInput(
            rewards=rewards if turns is None else besides_turns(rewards, turns, batch),
            kl_penalty=select_masked(penalty, mask),
            lengths=sum_per_row(mask, batch).long(),
            groups=require_column(batch.group, "group"),
            values=None if values is None else select_masked(values, mask),
            greedy=batch.greedy,
            turn_rewards=None if turns is None else select_masked(turns, mask),
            episodes=batch.episode,
            roles=batch.role,
            totals=rewards,
            entropies=None if batch.entropies is None else select_masked(batch.entropies, mask),
            kl_coef=self.kl_coef if is_charged and not self.config.kl.use_loss else 0.0,
            numbers=self.needed_numbers(numbers),
        )

    def needed_numbers(self, rows: Sequence[Mapping[str, float]]) -> Numbers:
        """Return the numbers that the estimator needs, [B] each.

        Raises:
            UserError: no sample has one of them, and none had it before.
        """
        for name in self.config.advantage.numbers:
            if name in self.given:
                continue
            if not any(name in row for row in rows):
                known = sorted({name for row in rows for name in row})
                raise UserError(
                    f"algo.advantage.estimator={self.config.advantage.estimator} needs the number {name!r} of samples, "
                    f"and no sample has it. They have {', '.join(known) or 'no numbers'}: let the reward or the agent "
                    "give it, or correct the name (docs/own_code_inputs.md)"
                )
            self.given.add(name)
        values = {name: [row.get(name, math.nan) for row in rows] for name in self.given}
        return Numbers({name: torch.tensor(column, dtype=torch.float32) for name, column in values.items()})


def means(values: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, float]:
    """Return the mean of each of the values [T] over masked tokens, by name; none without such tokens."""
    count = mask.sum()
    return {name: float(masked_sum(column, mask) / count) for name, column in values.items()} if count > 0 else {}


def besides_turns(rewards: torch.Tensor, turns: torch.Tensor, batch: Experience) -> torch.Tensor:
    """Return what is left of whole rewards [B] without those of the turns [T], [B], subtracted in float64."""
    of_turns = batch.episode_sums(sum_per_row(turns.double(), batch))
    return (rewards.double() - of_turns).to(rewards.dtype)


def sum_per_row(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return the sum of per-token values over each sequence, [B]."""
    return torch.segment_reduce(values, "sum", lengths=batch.lengths)


def put_back(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the values of the masked tokens at their places among all tokens, [T]; 0 elsewhere."""
    result = np.zeros(len(mask), values.numpy().dtype)
    result[mask.bool().numpy()] = values.numpy()
    return torch.from_numpy(result)
