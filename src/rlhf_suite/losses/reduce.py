"""How a loss over ragged tokens becomes a number: sums over units; the caller divides once, by the global count.

A unit is what a loss is a mean over. With N_u units in an optimiser step, counted over all micro-batches and ranks
before the first forward, the step's loss is (sum of all returned totals) / N_u, whatever the split.

    mode                       unit                                        weight of a masked token
    token-mean                 masked token                                1
    seq-mean-token-mean        sequence with at least one masked token     1 / (masked tokens of its sequence)
    seq-mean-token-sum-norm    sequence with at least one masked token     1 / horizon, the longest a response may be

The last is Dr. GRPO's (Liu et al. 2025): no response's tokens weigh more because it is short.

Where an episode has several sequences (`episode_tokens`), "sequence" in this table is the whole episode: each of its
sequences is the part of a unit that its masked tokens are of those of the episode. So the parts may be in different
micro-batches and on different ranks.

Shapes: T tokens of B sequences laid end to end; `mask` [T] holds 0 or 1, `segments` [T] the index of each token's
sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_suite.losses.metrics import Deviation, Mean, Metric
from rlhf_suite.registry import aggregation, is_own
from rlhf_suite.shapes import is_like, same_shape


@dataclass(frozen=True)
class LossSum:
    """A loss summed over its units, with gradient, and metrics without."""

    total: Tensor  # scalar
    metrics: Mapping[str, Metric]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` [T] over masked tokens; what stands elsewhere, NaN included, counts for nothing."""
    return torch.where(mask.bool(), values, 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Mean:
    """Mean of `values` [T] over masked tokens, without gradient: a metric."""
    return Mean(masked_sum(values.detach(), mask), mask.sum())


def counted_sum(values: Tensor, counted: Tensor) -> Tensor:
    """Sum of the `values` [N] of whole sequences or pairs that are counted; others may be NaN."""
    return torch.where(counted > 0, values, 0).sum()


def counted_mean(values: Tensor, counted: Tensor) -> Mean:
    """Their mean, without gradient: a metric."""
    return Mean(counted_sum(values.detach(), counted), counted.sum())


def counted_deviation(values: Tensor, counted: Tensor) -> Deviation:
    """Their standard deviation, without gradient: a metric."""
    mean = counted_mean(values, counted)
    return Deviation(mean.total, counted_sum(values.detach().square(), counted), mean.count)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of `weights * values` [T] over the tokens with a weight."""
    same_shape(values, weights)
    return (weights * torch.where(weights > 0, values, 0)).sum()


def sequence_sums(values: Tensor, segments: Tensor, num_sequences: int) -> Tensor:
    """Sum of `values` [T] over each sequence, [B]."""
    return values.new_zeros(num_sequences).index_add(0, segments, values)


def tokens_per_sequence(mask: Tensor, segments: Tensor, num_sequences: int) -> Tensor:
    """Number of masked tokens of each sequence, [B] float32."""
    return sequence_sums(mask.float(), segments, num_sequences)


def mark_counted_sequences(mask: Tensor, segments: Tensor, num_sequences: int) -> Tensor:
    """Which sequences weigh anything, [B] float32 of 0 and 1: those with a masked token."""
    return (tokens_per_sequence(mask, segments, num_sequences) > 0).float()


@dataclass(frozen=True)
class Weights:
    """How a batch is averaged: the weight of each token in the sum, [T] float32, and the number of units, a scalar."""

    tokens: Tensor
    units: Tensor


@aggregation(name="token-mean", needs=("tokens",))
def token_mean(
    mask: Tensor, segments: Tensor, num_sequences: int, horizon: int, episode_tokens: Tensor | None = None
) -> Weights:
    """The mean over masked tokens: each weighs the same."""
    return Weights(mask.float(), mask.float().sum())


@aggregation(name="seq-mean-token-mean", needs=("sequences",))
def seq_mean_token_mean(
    mask: Tensor, segments: Tensor, num_sequences: int, horizon: int, episode_tokens: Tensor | None = None
) -> Weights:
    """The mean over sequences of the mean over their masked tokens: each sequence weighs the same."""
    counts = tokens_per_sequence(mask, segments, num_sequences)  # [B]
    whole = (counts if episode_tokens is None else episode_tokens).clamp(min=1)
    return Weights(mask.float() / whole[segments], (counts / whole).sum())


@aggregation(name="seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(
    mask: Tensor, segments: Tensor, num_sequences: int, horizon: int, episode_tokens: Tensor | None = None
) -> Weights:
    """The mean over sequences of their token sums over the longest response allowed (Dr. GRPO, Liu et al. 2025)."""
    units = seq_mean_token_mean(mask, segments, num_sequences, horizon, episode_tokens).units
    return Weights(mask.float() / horizon, units)


def token_weights(
    mask: Tensor,
    segments: Tensor,
    num_sequences: int,
    mode: str,
    horizon: int = 1,
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """Return the weight of each token in the sum of `mode`, [T] float32. Those of the two means sum to `num_units`."""
    return compute_weights(mask, segments, num_sequences, mode, horizon, episode_tokens).tokens


def num_units(
    mask: Tensor, segments: Tensor, num_sequences: int, mode: str, episode_tokens: Tensor | None = None
) -> Tensor:
    """Return how many units of `mode` a batch holds, a float32 scalar; sequences without masked tokens do not count."""
    return compute_weights(mask, segments, num_sequences, mode, 1, episode_tokens).units


def compute_weights(
    mask: Tensor, segments: Tensor, num_sequences: int, mode: str, horizon: int, episode_tokens: Tensor | None
) -> Weights:
    """Return the weights and units of `mode`. One of the user's own knows sequences and no episodes.

    Args:
        mask: [T].
        segments: [T].
        num_sequences: B.
        mode: the name.
        horizon: the longest a response may be.
        episode_tokens: [B] masked tokens of the whole episode of each sequence; None: each is an episode of its own.
    """
    same_shape(mask, segments)
    further = () if episode_tokens is None or is_own(mode) else (episode_tokens,)
    weights: Weights = aggregation.load(mode)(mask, segments, num_sequences, horizon, *further)
    fits = isinstance(weights, Weights) and is_like(weights.tokens, mask) and isinstance(weights.units, Tensor)
    if not fits or weights.units.numel() != 1:
        raise aggregation.wrong_result(mode, weights, f"Weights(tokens [{len(mask)}], units: a scalar)")
    return weights


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact near 0 and far from it; x = 0 counts as -1e-7."""
    x = x.clamp(max=-1e-7)
    return torch.where(x > -0.693, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
