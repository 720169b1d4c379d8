"""Shaping, advantage estimators and correction weights from their papers: one response at a time, in plain floats.

Nothing here is the suite's own code. A response is what its model tokens are: gaps between them do not exist.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

GAMMA, LAMBDA, KL_COEF = 0.9, 0.8, 0.1
CLIP_RANGE, OVERLONG_BUFFER, OVERLONG_FACTOR, TRUNCATED_COEF = (-1.5, 1.5), 40, 0.7, 0.5
MAX_WEIGHT = 1.5  # of the correction, an upper bound
PART_WEIGHTS, BEST_OF = (1.0, 0.5), 3  # of gdpo, of pkpo
COV_BAND, CLIP_COV_SHARE, KL_COV_SHARE = (0.1, 0.5), 0.5, 0.2


@dataclass(frozen=True)
class Response:
    """One response; the lists have one number for each token that the model wrote."""

    prompt: int
    score: float
    longest: int  # how many tokens it could have had
    truncated: bool
    greedy: bool
    old: list[float]
    reference: list[float]
    teacher: list[float]
    engine: list[float]
    values: list[float]
    parts: tuple[float, float] = (0.0, 0.0)  # of the reward; gdpo reads nothing else

    def __len__(self) -> int:
        return len(self.old)

    @property
    def reward(self) -> float:
        """The score after clip (OpenRLHF), soft overlong punishment (DAPO) and stop-properly penalty (ProRL v2)."""
        low, high = CLIP_RANGE
        result = min(max(self.score, low), high)
        beyond = len(self) - (self.longest - OVERLONG_BUFFER)
        if beyond > 0:
            result -= OVERLONG_FACTOR * min(beyond, OVERLONG_BUFFER) / OVERLONG_BUFFER
        return TRUNCATED_COEF * result if self.truncated else result

    def token_rewards(self, reward: float) -> list[float]:
        """-beta k1 at every token, `reward` at the last."""
        each = [-KL_COEF * bounded(old - reference) for old, reference in zip(self.old, self.reference, strict=True)]
        return [*each[:-1], each[-1] + reward] if each else []


def bounded(log_ratio: float, limit: float = 10.0) -> float:
    return min(max(log_ratio, -limit), limit)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def baselined(estimator: str, response: Response, rollout: Sequence[Response]) -> float:
    """The reward after the baseline of the estimator; `rollout`: all responses, greedy ones too."""
    samples = [other for other in rollout if len(other) and not other.greedy]
    group = [other for other in samples if other.prompt == response.prompt]
    rewards = [other.reward for other in group]
    if estimator == "group_norm":
        return standardised(response.reward, rewards)
    if estimator == "gdpo":
        return standardised(part_sum(response, samples), [part_sum(other, samples) for other in samples])
    if estimator == "maxrl":
        return (response.reward - mean(rewards)) / mean(rewards)
    if estimator == "pkpo":
        others = [other.reward for other in group if other is not response]
        best = [max(chosen) for chosen in itertools.combinations(others, BEST_OF - 1)]
        return BEST_OF * mean([max(response.reward - each, 0.0) for each in best])
    if estimator == "on_policy_distill":
        return 0.0
    if estimator == "opo":
        baseline = math.fsum(len(other) * other.reward for other in group) / sum(map(len, group))
    else:
        compared = {
            "reinforce_baseline": rewards,
            "dr_grpo": rewards,
            "rloo": [other.reward for other in group if other is not response],
            "flash_reinforce": [other.reward for other in samples],
            "remax": [other.reward for other in rollout if other.greedy and other.prompt == response.prompt],
        }
        baseline = mean(compared.get(estimator, [0.0]))
    return response.reward - baseline


def standardised(value: float, values: Sequence[float]) -> float:
    """By the unbiased deviation."""
    centre = mean(values)
    return (value - centre) / math.sqrt(math.fsum((each - centre) ** 2 for each in values) / (len(values) - 1))


def part_sum(response: Response, samples: Sequence[Response]) -> float:
    """The weighted sum of the parts of a response's reward, each standardised among those of its prompt."""
    group = [other.parts for other in samples if other.prompt == response.prompt]
    columns = zip(response.parts, zip(*group, strict=True), PART_WEIGHTS, strict=True)
    return math.fsum(weight * standardised(part, column) for part, column, weight in columns)


def raw_advantages(estimator: str, response: Response, rollout: Sequence[Response]) -> list[float]:
    """Of every token, before whitening."""
    if not len(response):
        return []
    rewards = response.token_rewards(baselined(estimator, response, rollout))
    if estimator == "on_policy_distill":
        pull = [bounded(teacher - old) for teacher, old in zip(response.teacher, response.old, strict=True)]
        return [reward + each for reward, each in zip(rewards, pull, strict=True)]
    if estimator == "gae":  # the sum of its definition (Schulman et al. 2016, equation 16), not the recursion
        values = [*response.values, 0.0]
        deltas = [reward + GAMMA * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
        return [discounted(deltas[t:], GAMMA * LAMBDA) for t in range(len(deltas))]
    gamma = GAMMA if estimator == "reinforce" else 1.0
    return [discounted(rewards[t:], gamma) for t in range(len(rewards))]


def discounted(values: Sequence[float], factor: float) -> float:
    return math.fsum(factor**k * value for k, value in enumerate(values))


def advantages(estimator: str, rollout: Sequence[Response]) -> list[list[float]]:
    """Of every token of every response that is no greedy one."""
    raw = [raw_advantages(estimator, each, rollout) for each in rollout if not each.greedy]
    if estimator not in ("gae", "reinforce", "reinforce_baseline"):
        return raw
    tokens = [value for each in raw for value in each]
    centre = mean(tokens)
    deviation = math.sqrt(mean([(value - centre) ** 2 for value in tokens]))
    return [[(value - centre) / deviation for value in each] for each in raw]


def returns(rollout: Sequence[Response]) -> list[list[float]]:
    """What the critic learns with gae: advantage, not whitened, plus value."""
    return [
        [advantage + value for advantage, value in zip(raw_advantages("gae", each, rollout), each.values, strict=True)]
        for each in rollout
        if not each.greedy
    ]


def weights(response: Response, whole: bool) -> list[float]:
    """Truncated importance weights of the tokens (Yao et al. 2025): min(p / q, bound) of each token, or of the
    geometric mean over the response."""
    logs = [old - engine for old, engine in zip(response.old, response.engine, strict=True)]
    if whole and logs:
        logs = [mean(logs)] * len(logs)
    return [min(math.exp(each), MAX_WEIGHT) for each in logs]


def chosen(loss: str, rollout: Sequence[Response], found: Sequence[Sequence[float]]) -> list[list[float]]:
    """1 at the tokens that Clip-Cov or KL-Cov choose by their covariance (Cui et al. 2025), else 0; `found`: the
    advantages of every token. The band of Clip-Cov is so small that all of its tokens are chosen."""
    old = [value for each in rollout for value in each.old]
    flat = [value for row in found for value in row]
    products = [(log_prob - mean(old)) * (a - mean(flat)) for log_prob, a in zip(old, flat, strict=True)]
    if loss == "clip_cov":
        marks = [float(COV_BAND[0] < product < COV_BAND[1]) for product in products]
        assert 0 < sum(marks) <= CLIP_COV_SHARE * len(marks), "not all of them would be chosen"
    else:
        largest = sorted(products, reverse=True)[: int(KL_COV_SHARE * len(products))]
        marks = [float(product in largest) for product in products]
    places = iter(marks)
    return [[next(places) for _ in row] for row in found]
