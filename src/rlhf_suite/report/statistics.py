"""What several runs that differ in their seeds say together: mean, interquartile mean, and how sure each is.

The interquartile mean is the mean of the middle half: it is less moved by single runs than the mean, and uses more of
them than the median (Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95  # of the intervals
LEAST = 5  # below so many values there is no interval: they say too little of their spread
FEW = 10  # below so many values an interval is Student's
# The 0.975 quantile of Student's distribution for 2, 3, ... degrees of freedom.
STUDENT = (4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)

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
    """Return the ends of the interval of a statistic of values [N]; None for fewer than LEAST.

    It is the percentile bootstrap, whose resamples are drawn with a fixed seed. Of fewer than FEW values that would be
    too narrow (of five it covers the truth 86 % of the time), so there it is Student's: mean -+ t s / sqrt(N), and
    of the interquartile mean the same for trimmed means (Yuen, Biometrika 61, 1974). Of two values Student's would
    reach 13 times as far from their mean as they are, which says nothing.
    """
    if len(values) < LEAST:
        return None
    if len(values) < FEW:
        cut = len(values) // 4 if statistic is interquartile_mean else 0
        return students_interval(np.sort(values), cut)
    places = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(statistic(values[places]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def students_interval(values: NDArray[Any], cut: int) -> tuple[float, float]:
    """Return the ends of Student's interval of the mean of sorted values [N] without `cut` at each end, N < FEW.

    The deviation is that of the values in which those that were cut are replaced by their neighbours (winsorised).
    """
    number = len(values)
    kept = values[cut : number - cut]
    deviation = values.clip(kept[0], kept[-1]).std(ddof=1)
    error = STUDENT[len(kept) - 3] * deviation / ((1 - 2 * cut / number) * math.sqrt(number))
    return float(kept.mean() - error), float(kept.mean() + error)
