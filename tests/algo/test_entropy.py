"""The coefficient of the entropy bonus by the formula, within its bounds, and again from a checkpoint."""

from __future__ import annotations

import pytest

from rlhf_suite.algo.entropy import AdaptiveEntropy

TARGET, DELTA = 0.5, 0.25


def by_the_paper(entropies: list[float], coef: float) -> list[float]:
    """alpha_k = c_k where e_k <= target, else 0; then c moves by delta towards more below the target, less above it."""
    alphas = []
    for entropy in entropies:
        alphas.append(coef if entropy <= TARGET else 0.0)
        coef += DELTA if entropy < TARGET else -DELTA if entropy > TARGET else 0.0
    return alphas


@pytest.mark.notices(
    "the bonus is given above the target", "algo/entropy.py", "entropy <= self.target", "entropy >= self.target"
)
@pytest.mark.notices(
    "the bonus grows above the target",
    "algo/entropy.py",
    "self.target - entropy)",
    "entropy - self.target)",
)
def test_the_coefficient_is_that_of_the_paper():
    entropies = [0.4, 0.3, 0.5, 0.6, 0.4, 0.2, 0.9, 0.1]
    controller = AdaptiveEntropy(0.5, TARGET, DELTA, most=100.0)
    assert [controller.update(entropy) for entropy in entropies] == by_the_paper(entropies, 0.5)


@pytest.mark.notices("the coefficient has no bounds", "algo/entropy.py", "min(max(moved, 0.0), self.most)", "moved")
def test_the_coefficient_stays_within_its_bounds():
    controller = AdaptiveEntropy(0.0, TARGET, DELTA, most=0.6)
    given = [controller.update(entropy) for entropy in (2.0, 2.0, 0.1, 0.1, 0.1, 0.1, 0.1)]
    assert given == [0, 0, 0, 0.25, 0.5, 0.6, 0.6]


@pytest.mark.notices(
    "a checkpoint holds the first coefficient", "algo/entropy.py", "self.coef = state", "state = state"
)
def test_a_continued_controller_goes_on_from_its_checkpoint():
    first = AdaptiveEntropy(0.0, TARGET, DELTA, most=1.0)
    first.update(0.1)
    second = AdaptiveEntropy(0.0, TARGET, DELTA, most=1.0)
    second.load_state_dict(first.state_dict())
    assert second.update(0.1) == first.update(0.1) == DELTA
