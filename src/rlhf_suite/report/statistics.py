"""What several runs that differ in their seeds say together: mean, interquartile mean, and how sure each is.

The interquartile mean is the mean of the middle half: it is less moved by single runs than the mean, and uses more of
them than the median (Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95  # of the intervals

Statistic = Callable[[NDArray[Any]], NDArray[Any]]


def mean(values: NDArray[Any]) -> NDArray[Any]:
    """Return the mean over the last axis, [..., N] to [...]."""
    return np.asarray(values.mean(-1))


def interquartile_mean(values: NDArray[Any]) -> NDArray[Any]:
    """Return the mean over the last axis without the lowest and the highest quarter of the values, [..., N] to [...].

    Of each end floor(N / 4) values are left out.
    """
    number = values.shape[-1]
    cut = number // 4
    return np.asarray(np.sort(values, -1)[..., cut : number - cut].mean(-1))


def interval(values: NDArray[Any], statistic: Statistic) -> tuple[float, float] | None:
    """Return the ends of the percentile bootstrap interval of a statistic of values [N]; None for fewer than two.

    Resamples are drawn with a fixed seed, so the same values give the same interval.
    """
    if len(values) < 2:
        return None
    places = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(statistic(values[places]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
