"""How far scores agree with labels, and a judge with itself: what `task=check_reward` says of a judge.

Rows with the same prompt whose labels are different numbers are pairs of a better and a worse response.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

from rlhf_suite.rewards.base import Outcome, RewardFailure, Sample, Scored

SAME = 1e-9  # scores that differ by less are equal


def measure_agreement(samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the number of labelled pairs, the share of them in which the better response has the larger score (equal
    scores count half), the share with equal scores, and the share of them without a verdict, which counts in neither
    of the two."""
    groups: defaultdict[str, list[tuple[float, Outcome]]] = defaultdict(list)
    for sample, outcome in zip(samples, outcomes, strict=True):
        label = read_label(sample.label)
        if label is not None:
            groups[sample.prompt].append((label, outcome))
    pairs = [pair for group in groups.values() for pair in combinations(group, 2) if pair[0][0] != pair[1][0]]
    if not pairs:
        return {}
    gaps = list[float]()
    for pair in pairs:
        (_, worse), (_, better) = sorted(pair, key=lambda entry: entry[0])
        if isinstance(worse, Scored) and isinstance(better, Scored):
            gaps.append(better.reward - worse.reward)
    result = {"pairs": float(len(pairs)), "pairs_without_verdict": 1 - len(gaps) / len(pairs)}
    if gaps:
        ties = sum(abs(gap) < SAME for gap in gaps)
        right = sum(gap >= SAME for gap in gaps)
        result |= {"pair_accuracy": (right + ties / 2) / len(gaps), "pair_ties": ties / len(gaps)}
    return result


def measure_repetition(first: Sequence[Outcome], second: Sequence[Outcome]) -> dict[str, float]:
    """Return the share of responses without a verdict of those that were asked about twice, the share of equal rewards
    among those that have two, and the mean difference of these."""
    asked = [*first, *second]
    if not asked:
        return {}
    result = {"no_verdict": sum(isinstance(outcome, RewardFailure) for outcome in asked) / len(asked)}
    both = [
        abs(a.reward - b.reward)
        for a, b in zip(first, second, strict=True)
        if isinstance(a, Scored) and isinstance(b, Scored)
    ]
    if both:
        result["self_agreement"] = sum(gap < SAME for gap in both) / len(both)
        result["self_difference"] = math.fsum(both) / len(both)
    return result


def read_label(label: str) -> float | None:
    """Return a label as a number; None where it is not one."""
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
