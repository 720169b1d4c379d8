"""Engine against trainer: how far they disagree about the same tokens, and weights that correct for it.

The engine sampled from q, the trainer's policy at the start of the update is p (`old_log_probs`). The gradient wants
samples of p, so each token's loss is multiplied by w = p / q or a bounded form of it. It is the behaviour part of
decoupled PPO (Hilton et al. 2022): the ratio that PPO clips is still pi / p, also when q belongs to older weights.

    level    what is one unit         ratio's statistic s          weight of its tokens
    token    each token               w_t                          w_t
    seq      a sequence's tokens      geometric mean of w          each its own w_t
    geo      a sequence's tokens      geometric mean of w          that mean, the same for all

What becomes of units outside of the band is the mode, a function declared with `@correction`; what is compared with
the band is the gating, declared with `@gating`. Both are below, and may be a function of a user's own.

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

from rlhf_suite import registry
from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.registry import correction, gating
from rlhf_suite.shapes import is_like, same_shape

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
    count, parts = int((kept := mask.bool()).sum()), []
    if not count:
        return None
    for engine, trainer, chosen in slabs(engine_log_probs, trainer_log_probs, kept):
        difference = select_masked(engine, chosen).double() - select_masked(trainer, chosen).double()  # [N]
        kl = (-difference).expm1() + difference  # expm1: near zero it is d^2 / 2, far below the rounding of exp
        if len(difference):
            parts.append(torch.stack([difference.abs().sum(), difference.abs().max(), kl.sum()]))
    (total, _, kl), (_, largest, _) = torch.stack(parts).sum(0), torch.stack(parts).amax(0)
    return Mismatch(float(total) / count, float(largest), float(kl) / count)


def slabs(*values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of tensors of one length, so that not all of them is in memory in double precision at a time."""
    return zip(*(value.split(SLAB) for value in values), strict=True)


def select_masked(values: Tensor, mask: Tensor) -> Tensor:
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
        return log_weights(self.old_log_probs, self.engine_log_probs, self.mask)

    def parts(self) -> Iterator[CorrectionInput]:
        """Yield the sequences in parts of about `SLAB` tokens."""
        begin = self.lengths.cumsum(0) - self.lengths
        sizes = torch.unique_consecutive(begin // SLAB, return_counts=True)[1].tolist()  # sequences
        tokens = [int(lengths.sum()) for lengths in self.lengths.split(sizes)]
        columns = (column.split(tokens) for column in (self.old_log_probs, self.engine_log_probs, self.mask))
        yield from map(CorrectionInput, *columns, self.lengths.split(sizes))


def log_weights(old_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return log p - log q within +-20, [T]; 0 outside the mask."""
    difference = torch.where(mask.bool(), old_log_probs - engine_log_probs, 0)
    return difference.clamp_(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)


def correction_weights(inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """Return what each token's loss is multiplied with under `algo.advantage.is_correction_*`, [T]; 0 outside the mask.
    The suite's own functions look at each sequence alone, so they get some at a time, which takes less memory.

    Raises:
        WrongResult: a mode or a gating of the user's own returns something else.
    """
    assert config.is_correction_level != "off"
    mode, weights = config.is_correction_mode, torch.empty_like(inputs.old_log_probs)
    looks_at_all = registry.is_own(mode) or registry.is_own(config.is_correction_gating)
    begin = 0
    for part in [inputs] if looks_at_all else inputs.parts():
        values = per_token(correction, mode, part, config)
        weights[begin : begin + len(values)] = torch.where(part.mask.bool(), values, 0)
        begin += len(values)
    return weights


def per_token(kind: registry.Kind, name: str, inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """Return what a mode or a gating says of each token, [T]."""
    values: Tensor = kind.load(name)(inputs, config)
    if not is_like(values, inputs.mask):
        raise kind.wrong_result(name, values, f"one number for each of the {len(inputs.mask)} tokens")
    return values


@correction(reads=("is_correction_gating", "is_correction_threshold"))
def mask(inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """Tokens or sequences outside the band get the weight 0."""
    low, high = band(config)
    statistic = per_token(gating, config.is_correction_gating, inputs, config)
    return torch.where((statistic >= low) & (statistic <= high), unit_weights(inputs, config), 0)


@correction(needs=("ratio", "unit_weight"), reads=("is_correction_gating", "is_correction_threshold"))
def clip(inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """The weight is bounded by the band (token and geo, by their ratio)."""
    return unit_weights(inputs, config).clamp(*band(config))


def unit_weights(inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """Return the weight w of each token, [T]; at level geo the geometric mean of its sequence."""
    log_weights = inputs.log_weights
    return (unit_mean(log_weights, inputs) if config.is_correction_level == "geo" else log_weights).exp()


def band(config: AdvantageConfig) -> tuple[float, float]:
    """Return `algo.advantage.is_correction_threshold` as (low, high); one value is the upper bound."""
    threshold = config.is_correction_threshold
    return (0.0, threshold[0]) if len(threshold) == 1 else (threshold[0], threshold[1])


@gating()
def ratio(inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """The ratio w of a token; for a sequence the geometric mean of its tokens."""
    return of_units(inputs.log_weights, inputs, config).exp()


@gating(needs=("upper_bound",))
def binary_kl(inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """q ln(q / p) + (1 - q) ln((1 - q) / (1 - p)), with p and q those of the sampled token; of a sequence its mean."""
    p, q = probabilities(inputs)
    return of_units(divergence(q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log(), inputs), inputs, config)


@gating(needs=("upper_bound",))
def tv(inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """|q - p| of the sampled token; of a sequence its mean."""
    p, q = probabilities(inputs)
    return of_units(divergence((q - p).abs(), inputs), inputs, config)


def probabilities(inputs: CorrectionInput) -> tuple[Tensor, Tensor]:
    """Return p and q of the sampled tokens, [T] each, away from 0 and 1."""
    p, q = (
        log_probs.double().exp().clamp(EPSILON, 1 - EPSILON)
        for log_probs in (inputs.old_log_probs, inputs.engine_log_probs)
    )
    return p, q


def divergence(values: Tensor, inputs: CorrectionInput) -> Tensor:
    """Return a divergence between q and p of the sampled token against all others, [T]; 0 outside the mask.

    Rounding can make it slightly negative where engine and trainer agree best. It is clamped at 0, so that a band that
    begins at 0 keeps those tokens.
    """
    return torch.where(inputs.mask.bool(), values.clamp(min=0), 0)


def of_units(values: Tensor, inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """Return numbers of tokens, [T], or at the levels of sequences the mean of each token's sequence, [T]."""
    return values if config.is_correction_level == "token" else unit_mean(values, inputs)


def unit_mean(values: Tensor, inputs: CorrectionInput) -> Tensor:
    """Return the mean of `values` over the masked tokens of each token's sequence, [T]."""
    return sequence_mean(values, inputs)[inputs.segments]


def sequence_mean(values: Tensor, inputs: CorrectionInput) -> Tensor:
    """Return the mean of `values` [T], 0 outside the mask, over the masked tokens of each sequence, [B]."""
    sums, counts = (
        torch.zeros(len(inputs.lengths), dtype=torch.float64).index_add(0, inputs.segments, tokens.double())
        for tokens in (values, inputs.mask)
    )
    return sums / counts.clamp(min=1)


def correction_metrics(inputs: CorrectionInput, weights: Tensor) -> dict[str, float]:
    """Return over masked tokens: the share that weighs 0 (`masked`), the mean of w = p / q (`ratio`; 1 when nothing
    differs), its chi^2 = mean(w^2) - 1, and the effective share of the samples (`ess`), which is
    (sum weight)^2 / (n sum weight^2)."""
    if not (count := int(inputs.mask.bool().sum())):
        return {}
    parts = []
    for old, engine, chosen, mask in slabs(inputs.old_log_probs, inputs.engine_log_probs, weights, inputs.mask):
        kept = mask.bool()
        ratio = select_masked(log_weights(old, engine, kept), kept).double().exp()
        used = select_masked(chosen, kept).double()
        parts.append(torch.stack([(used == 0).sum(), *(x.sum() for x in (ratio, ratio**2, used, used**2))]))
    zero, ratios, ratio_squares, total, squares = (torch.stack(parts).sum(0) / count).tolist()
    return {
        "correction/masked": zero,
        "correction/ratio": ratios,
        "correction/chi2": ratio_squares - 1,
        "correction/ess": total**2 / squares if squares else 0.0,
    }
