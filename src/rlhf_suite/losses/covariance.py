"""Which tokens make the policy lose its entropy: those whose log-prob and advantage are both far from their means.

Of N masked tokens (Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
arXiv:2505.22617):

    Cov_t = (log pi_t - mean log pi) (A_t - mean A)

The mean of Cov_t is how much a step of the policy gradient lowers the entropy, and a few tokens make most of it. The
losses `clip_cov` and `kl_cov` hold these back.

The paper takes pi of the moment and the tokens of an optimiser step. Here pi is the policy before the update and the
tokens are those of the whole rollout, so that they are chosen once, whatever the optimiser steps, micro-batches, rows
and ranks are. In the first optimiser step both pi are the same.

Shapes: T tokens laid end to end, `mask` [T] of 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_suite.shapes import same_shape


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return Cov_t at each masked token, [T] float64; 0 elsewhere."""
    same_shape(log_probs, advantages, mask)
    is_masked = mask.bool()
    count = is_masked.sum().clamp(min=1)
    centred = []
    for values in (log_probs, advantages):
        kept = torch.where(is_masked, values.double(), 0)
        centred.append(torch.where(is_masked, kept - kept.sum() / count, 0))
    return centred[0] * centred[1]


def choose_in_band(
    covariance: Tensor, mask: Tensor, band: Sequence[float], share: float, draw: np.random.Generator
) -> Tensor:
    """Return which tokens Clip-Cov leaves out, [T] bool: `share` of all masked tokens (one at least), drawn among those
    with low < Cov < high; fewer where there are not so many."""
    low, high = band
    candidates = np.flatnonzero((mask.bool() & (covariance > low) & (covariance < high)).numpy())
    count = min(count_share(mask, share), len(candidates))
    return mark(covariance, draw.choice(candidates, count, replace=False))


def choose_largest(covariance: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return which tokens KL-Cov holds back, [T] bool: `share` of all masked tokens (one at least), those with the
    largest Cov; of equal ones the first."""
    places = np.flatnonzero(mask.bool().numpy())
    count = min(count_share(mask, share), len(places))
    if not count:
        return mark(covariance, places)
    values = covariance.numpy()[places]
    least = np.partition(values, len(values) - count)[len(values) - count]
    above, equal = places[values > least], places[values == least]
    return mark(covariance, np.concatenate([above, equal[: count - len(above)]]))


def count_share(mask: Tensor, share: float) -> int:
    """Return how many tokens a share of the masked ones is, one at least."""
    return max(int(share * float(mask.sum())), 1)


def mark(like: Tensor, places: np.ndarray) -> Tensor:
    """Return which of as many tokens as `like` has are at `places`, [T] bool."""
    chosen = torch.zeros(len(like), dtype=torch.bool)
    chosen[torch.from_numpy(places)] = True
    return chosen
