"""Rewards to advantages and returns: KL penalty, estimator, teacher; and the KL controller that adapts."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlhf_suite.algo.advantage import CreditInput, assign_credit
from rlhf_suite.algo.kl import estimate_kl, make_kl_controller
from rlhf_suite.algo.ragged import pad, unpad
from rlhf_suite.config.algo import AlgoConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.losses.reduce import masked_sum


class CreditAssigner:
    """Assigns credit to the model tokens of a rollout, over the whole of it at once."""

    def __init__(self, config: AlgoConfig) -> None:
        self.config = config
        self.controller = make_kl_controller(config.kl)

    @property
    def kl_coef(self) -> float:
        """The coefficient beta of this step."""
        return self.controller.coef

    def adapt(self, metrics: dict[str, float], num_samples: int) -> None:
        """Let the controller see the step's KL, once per step."""
        if "train/kl" in metrics:
            self.controller.update(metrics["train/kl"], num_samples)

    def assign(self, batch: TokenBatch) -> tuple[TokenBatch, dict[str, float]]:
        """Adds the tokens `advantages` and, with values, `returns`. Everything is [B, L] in between.

        With a teacher every token also gets algo.distill.coef x (log p_teacher - log p_policy), a reward that no other
        token shares (discount 0): in the mean over samples the policy falls along its reverse KL to the teacher
        (Lu et al., "On-Policy Distillation", 2025).
        """
        mask = batch.tokens["mask"]
        kl = torch.zeros_like(mask)
        metrics: dict[str, float] = {"train/kl_coef": self.kl_coef}
        if "ref_log_probs" in batch.tokens:
            old, reference = batch.tokens["old_log_probs"], batch.tokens["ref_log_probs"]
            kl = estimate_kl(old, reference, self.config.kl.estimator) * mask
            metrics |= {"train/kl": mean(kl, mask), "train/logprobs_diff": mean(old - reference, mask)}
        penalty = torch.zeros_like(kl) if self.config.kl.use_loss else kl * self.kl_coef
        values = batch.tokens.get("values")
        credit = assign_credit(
            CreditInput(
                rewards=batch.rows["reward"],
                kl_penalty=pad(penalty, batch.lengths),
                values=None if values is None else pad(values, batch.lengths),
                mask=pad(mask, batch.lengths),
                groups=batch.rows["group"],
                greedy=batch.rows.get("greedy"),
            ),
            self.config.advantage,
        )
        advantages = unpad(credit.advantages, batch.lengths)
        if "teacher_log_probs" in batch.tokens:
            gap = estimate_kl(batch.tokens["old_log_probs"], batch.tokens["teacher_log_probs"], "k1") * mask
            advantages = advantages - self.config.distill.coef * gap
            metrics["train/teacher_kl"] = mean(gap, mask)
        tokens = {**batch.tokens, "advantages": advantages}
        if values is not None:
            tokens["returns"] = unpad(credit.returns, batch.lengths)
            metrics["train/values"] = mean(values, mask)
        metrics["train/return"] = float((batch.rows["reward"] - sum_per_row(penalty * mask, batch)).mean())
        return replace(batch, tokens=tokens), metrics


def mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean of `values` [T] over masked tokens; 0 of none."""
    return float(masked_sum(values, mask) / mask.sum().clamp(min=1))


def sum_per_row(values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Sum of per-token values over each sequence, [B]."""
    return torch.zeros(len(batch)).index_add_(0, batch.segments, values)
