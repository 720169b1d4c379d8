"""Engine against trainer: how far they disagree about the same tokens, and weights that correct for it.

The engine sampled from q, the trainer's policy at the start of the update is p (`old_log_probs`). The gradient wants
samples of p, so each token's loss is multiplied by w = p / q or a bounded form of it. It is the behaviour part of
decoupled PPO (Hilton et al. 2022): the ratio that PPO clips is still pi / p, also when q belongs to older weights.

    level    what is one unit         ratio's statistic s          weight of its tokens
    token    each token               w_t                          w_t
    seq      a sequence's tokens      geometric mean of w          each its own w_t
    geo      a sequence's tokens      geometric mean of w          that mean, the same for all

    mode     band [low, high] on the statistic
    mask     units outside weigh 0
    clip     the weight is bounded by the band instead (token and geo, by their ratio)

    gating       statistic instead of w, with p and q those of the sampled token; its mean over the tokens of a sequence
    binary_kl    q ln(q / p) + (1 - q) ln((1 - q) / (1 - p))
    tv           |q - p|

Truncated importance sampling (Yao et al. 2025) is token, clip; IcePop (Ling team 2025) token, mask; masked sequences
seq, mask; FlashREINFORCE's trust region seq, mask, binary_kl.

Shapes: T tokens of B sequences laid end to end; `mask` [T], `lengths` [B].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlhf_suite.config.algo import AdvantageConfig
from rlhf_suite.shapes import same_shape

MAX_LOG_WEIGHT = 20.0
EPSILON = 1e-6  # of probabilities in divergences
SLAB = 1 << 20  # tokens whose differences are in memory at a time


@dataclass(frozen=True)
class Mismatch:
    """Engine against trainer log-probs of the sampled tokens, in nats."""

    mean_abs: float
    max_abs: float
    kl: float  # k3 estimate of KL(engine || trainer) per token


def mismatch(engine_log_probs: Tensor, trainer_log_probs: Tensor, mask: Tensor) -> Mismatch | None:
    """Return over masked tokens, with d = engine - trainer: mean |d|, max |d| and mean(exp(-d) - 1 + d); None without
    any. All any one shape."""
    parts = []
    for engine, trainer, chosen in slabs(engine_log_probs, trainer_log_probs, mask):
        difference = masked(engine, chosen).double() - masked(trainer, chosen).double()  # [N]
        kl = (-difference).expm1() + difference  # expm1: near zero it is d^2 / 2, far below the rounding of exp
        if len(difference):
            parts.append(torch.stack([difference.abs().sum(), difference.abs().max(), kl.sum()]))
    if not parts:
        return None
    (total, _, kl), (_, largest, _) = torch.stack(parts).sum(0), torch.stack(parts).amax(0)
    count = int(mask.bool().sum())
    return Mismatch(float(total) / count, float(largest), float(kl) / count)


def slabs(*values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of tensors of one length, so that not all of them is in memory in double precision at a time."""
    return zip(*(each.split(SLAB) for each in values), strict=True)


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values of the N masked tokens, [N], all on the CPU: NumPy selects them much faster than torch."""
    return torch.from_numpy(values.numpy()[mask.bool().numpy()])


@dataclass(frozen=True)
class CorrectionInput:
    """What the correction reads; nothing carries a gradient."""

    old_log_probs: Tensor  # [T] log p
    engine_log_probs: Tensor  # [T] log q
    mask: Tensor  # [T]
    lengths: Tensor  # [B] int64, tokens of each sequence, masked or not

    def __post_init__(self) -> None:
        same_shape(self.old_log_probs, self.engine_log_probs, self.mask)
        assert int(self.lengths.sum()) == len(self.mask), "lengths count the tokens"

    @cached_property
    def segments(self) -> Tensor:
        """The index of each token's sequence, [T]."""
        return torch.repeat_interleave(self.lengths, output_size=len(self.mask))

    @cached_property
    def log_weights(self) -> Tensor:
        """log p - log q within +-20, [T]; 0 outside the mask."""
        difference = torch.where(self.mask.bool(), self.old_log_probs - self.engine_log_probs, 0)
        return difference.clamp_(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)


def correction_weights(inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """What each token's loss is multiplied with under `algo.advantage.is_correction_*`, [T]; 0 outside the mask."""
    assert config.is_correction_level != "off"
    log_weights = inputs.log_weights
    if config.is_correction_level == "geo":
        log_weights = sequence_mean(log_weights, inputs)[inputs.segments]
    weights = log_weights.exp()
    low, high = band(config)
    if config.is_correction_mode == "clip":
        weights = weights.clamp(low, high)
    else:
        statistic = gating_statistic(inputs, config)
        weights = torch.where((statistic >= low) & (statistic <= high), weights, 0)
    return torch.where(inputs.mask.bool(), weights, 0).to(inputs.old_log_probs.dtype)


def band(config: AdvantageConfig) -> tuple[float, float]:
    """`algo.advantage.is_correction_threshold` as (low, high); one value is the upper bound."""
    threshold = config.is_correction_threshold
    return (0.0, threshold[0]) if len(threshold) == 1 else (threshold[0], threshold[1])


def gating_statistic(inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """What is compared with the band, [T]; the same at all tokens of a sequence unless the level is token."""
    if config.is_correction_gating == "ratio":
        values = inputs.log_weights
    else:
        values = divergence(inputs, config.is_correction_gating)
    if config.is_correction_level != "token":
        values = sequence_mean(values, inputs)[inputs.segments]
    return values.exp() if config.is_correction_gating == "ratio" else values


def divergence(inputs: CorrectionInput, gating: str) -> Tensor:
    """Return the divergence between q and p of the sampled token against all others, [T]; 0 outside the mask.

    Rounding can make it slightly negative where engine and trainer agree best. It is clamped at 0, so that a band that
    begins at 0 keeps those tokens.
    """
    p, q = (
        log_probs.double().exp().clamp(EPSILON, 1 - EPSILON)
        for log_probs in (inputs.old_log_probs, inputs.engine_log_probs)
    )
    values = (q - p).abs() if gating == "tv" else q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    return torch.where(inputs.mask.bool(), values.clamp(min=0), 0)


def sequence_mean(values: Tensor, inputs: CorrectionInput) -> Tensor:
    """Mean of `values` [T], 0 outside the mask, over the masked tokens of each sequence, [B]."""
    sums, counts = (
        torch.zeros(len(inputs.lengths), dtype=torch.float64).index_add(0, inputs.segments, each.double())
        for each in (values, inputs.mask)
    )
    return sums / counts.clamp(min=1)


def correction_metrics(inputs: CorrectionInput, weights: Tensor) -> dict[str, float]:
    """Over masked tokens: the share that weighs 0 (`masked`), the mean of w = p / q (`ratio`; 1 when nothing differs),
    its chi^2 = mean(w^2) - 1, and the effective share of the samples (`ess`), (sum weight)^2 / (n sum weight^2)."""
    if not (count := int(inputs.mask.bool().sum())):
        return {}
    parts = []
    for log_weights, chosen, mask in slabs(inputs.log_weights, weights, inputs.mask):
        ratio, used = masked(log_weights, mask).double().exp(), masked(chosen, mask).double()
        parts.append(torch.stack([(used == 0).sum(), *(x.sum() for x in (ratio, ratio**2, used, used**2))]))
    zero, ratios, ratio_squares, total, squares = (torch.stack(parts).sum(0) / count).tolist()
    return {
        "correction/masked": zero,
        "correction/ratio": ratios,
        "correction/chi2": ratio_squares - 1,
        "correction/ess": total**2 / squares if squares else 0.0,
    }
