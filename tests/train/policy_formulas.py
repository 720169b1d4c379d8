"""The objectives of tokens with a mask (next token, policy, critic), and their formulas on the full log-softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhf_suite.config.declarations.algo import KLConfig
from rlhf_suite.config.declarations.models import ActorConfig, CriticConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.losses.tokens import next_token_loss
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.rl.objectives import PolicyObjective, ValueObjective
from rlhf_suite.train.task import Forward, Objective, StepLoss

TEMPERATURE, KL_COEF, ENTROPY_COEF, DUAL_CLIP, CLIP, VALUE_CLIP = 0.8, 0.07, 0.05, 1.3, (0.2, 0.28), 0.4
HORIZON = 64  # the longest a response may be
DPPO = {"tv": 5e-4, "kl": 1e-4}  # so that random models' probabilities of about 1 / 256 pass them
DRO_BETA = 0.05
DPPO_RATIO, KL_COV = 1.3, 0.4
TAU = {True: 0.7, False: 1.3}  # of sapo, where the advantage is positive, and elsewhere


@dataclass
class NextToken:
    """SFT's objective without a tokenizer around it."""

    def units(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        return {"tokens": batch.mask.sum()}

    def loss(self, model: Forward, batch: TokenBatch) -> StepLoss:
        mask = batch.mask
        loss = next_token_loss(token_log_probs(model, batch, masked=True).log_probs, mask)
        return StepLoss({"tokens": loss.total}, loss.metrics)


def policy(mode: str) -> PolicyObjective:
    actor = ActorConfig.of(
        "ppo", loss_agg_mode=mode, dual_clip=DUAL_CLIP, entropy_coef=ENTROPY_COEF, eps_clip_low_high=list(CLIP)
    )
    return PolicyObjective(actor, KLConfig(use_loss=True, estimator="k3"), TEMPERATURE, HORIZON, KL_COEF)


OBJECTIVES: dict[str, Objective[Experience]] = {
    "next token": NextToken(),
    "ppo, token-mean": policy("token-mean"),
    "ppo, seq-mean-token-mean": policy("seq-mean-token-mean"),
    "value": ValueObjective(CriticConfig.of("ppo", value_clip=VALUE_CLIP)),
}


def head_of(loss: str) -> str:
    return "value" if loss == "value" else "lm"


@dataclass
class Sequence:
    """What a formula reads of one sequence: tokens 1.. of it, [L-1], and the full log-softmax [L-1, V] or values."""

    batch: Experience
    row: int
    outputs: torch.Tensor

    def __getattr__(self, name: str) -> torch.Tensor:
        return getattr(self.batch, name)[self.batch.segments == self.row][1:].double()

    @property
    def log_probs(self) -> torch.Tensor:
        ids = self.batch.ids[self.batch.segments == self.row][1:]
        return self.outputs[torch.arange(len(ids)), ids]


def formula(loss: str, sequences: list[Sequence]) -> torch.Tensor:
    """The step's loss over all sequences."""
    num_tokens = sum(float(s.mask.sum()) for s in sequences)
    if loss == "next token":
        return -sum((s.log_probs * s.mask).sum() for s in sequences) / num_tokens
    if loss == "value":
        return sum((value_terms(s) * s.mask).sum() for s in sequences) / num_tokens
    chosen = [s for s in sequences if s.mask.sum() > 0]
    if loss == "ppo, token-mean":
        surrogate = sum((surrogate_terms(s) * s.mask).sum() for s in chosen) / num_tokens
    else:
        surrogate = sum((surrogate_terms(s) * s.mask).sum() / s.mask.sum() for s in chosen) / len(chosen)
    return surrogate + sum((regulariser_terms(s) * s.mask).sum() for s in chosen) / num_tokens


def surrogate_terms(s: Sequence) -> torch.Tensor:
    ratio = torch.exp(s.log_probs - s.old_log_probs)
    clipped = torch.minimum(torch.maximum(ratio, torch.tensor(1 - CLIP[0])), torch.tensor(1 + CLIP[1]))
    gain = torch.minimum(ratio * s.advantages, clipped * s.advantages)
    floor = torch.maximum(gain, DUAL_CLIP * s.advantages)
    return -torch.where(s.advantages < 0, floor, gain)


def regulariser_terms(s: Sequence) -> torch.Tensor:
    difference = s.ref_log_probs - s.log_probs
    k3 = torch.exp(difference) - difference - 1
    entropy = -(s.outputs.exp() * s.outputs).sum(-1)
    return KL_COEF * k3 - ENTROPY_COEF * entropy


def value_terms(s: Sequence) -> torch.Tensor:
    low, high = s.values - VALUE_CLIP, s.values + VALUE_CLIP
    clipped = torch.minimum(torch.maximum(s.outputs, low), high)
    return 0.5 * torch.maximum((s.outputs - s.returns) ** 2, (clipped - s.returns) ** 2)


# Every policy loss under every aggregation, with a correction.


def token_terms(loss: str, s: Sequence) -> torch.Tensor:
    """The loss of each token of a sequence, [L-1]."""
    log_ratio, mask = s.log_probs - s.old_log_probs, s.mask
    if loss in ("reinforce", "dro"):
        pull = DRO_BETA / 2 * log_ratio**2 if loss == "dro" else 0.0
        return -s.advantages * s.log_probs + pull
    if loss == "gspo":  # what a token's own log-prob does to the sequence's ratio, times the length
        mean = ((log_ratio * mask).sum() / mask.sum()).detach()
        ratio = torch.exp(mean) * torch.exp(s.log_probs - s.log_probs.detach())
    else:
        ratio = torch.exp(log_ratio)
    bounded = torch.minimum(torch.maximum(ratio, torch.tensor(1 - CLIP[0])), torch.tensor(1 + CLIP[1]))
    if loss == "cispo":
        return -bounded.detach() * s.advantages * s.log_probs
    if loss in ("dppo_tv", "dppo_kl"):
        now, old = torch.exp(s.log_probs.detach()), torch.exp(s.old_log_probs)
        kl = old * torch.log(old / now) + (1 - old) * torch.log((1 - old) / (1 - now))
        far = (now - old).abs() > DPPO["tv"] if loss == "dppo_tv" else kl > DPPO["kl"]
        outwards = (s.advantages > 0) & (now > old) | (s.advantages < 0) & (now < old)
        weight = torch.minimum(now / old, torch.tensor(DPPO_RATIO))
        return -torch.where(far & outwards, 0.0, weight) * s.advantages * s.log_probs
    if loss == "sapo":
        tau = torch.tensor([TAU[bool(a > 0)] for a in s.advantages], dtype=torch.float64)
        return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * s.advantages
    if loss in ("importance_sampling", "kl_cov"):
        pull = s.chosen * KL_COV * log_ratio.abs() if loss == "kl_cov" else 0.0
        return -ratio * s.advantages + pull
    surrogate = -torch.minimum(ratio * s.advantages, bounded * s.advantages)
    return surrogate * (1 - s.chosen) if loss == "clip_cov" else surrogate


def corrected_loss(loss: str, mode: str, sequences: list[Sequence]) -> torch.Tensor:
    """The step's loss over all sequences."""
    chosen = [s for s in sequences if s.mask.sum() > 0]
    sums = [(token_terms(loss, s) * s.correction * s.mask).sum() for s in chosen]
    sizes = [float(s.mask.sum()) for s in chosen]
    if mode == "token-mean":
        return sum(sums) / sum(sizes)
    divisors = [HORIZON] * len(sizes) if mode == "seq-mean-token-sum-norm" else sizes
    return sum(part / divisor for part, divisor in zip(sums, divisors, strict=True)) / len(chosen)
