"""How far the engine that sampled and the trainer that learns disagree about the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mismatch:
    """Engine against trainer log-probs of the sampled tokens, in nats."""

    mean_abs: float
    max_abs: float
    kl: float  # k3 estimate of KL(engine || trainer) per token


def mismatch(engine_log_probs: Tensor, trainer_log_probs: Tensor, mask: Tensor) -> Mismatch:
    """Over masked tokens, with d = engine - trainer: mean |d|, max |d| and mean(exp(-d) - 1 + d). All any one shape."""
    difference = (engine_log_probs.double() - trainer_log_probs.double())[mask.bool()]  # [number of masked tokens]
    if difference.numel() == 0:
        return Mismatch(0.0, 0.0, 0.0)
    kl = (-difference).expm1() + difference  # expm1: near zero the estimate is d^2 / 2, far below the rounding of exp
    return Mismatch(float(difference.abs().mean()), float(difference.abs().max()), float(kl.mean()))
