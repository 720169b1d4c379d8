"""Rewards, groups, values and log-probs become the gradient of the formulas, whatever splits the step up.

Every policy loss under every aggregation, every estimator and the critic once; `benchmarks/gradient_equality.py`
computes every loss with every estimator in every split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from credit_formulas import CLIP_RANGE, MAX_WEIGHT, OVERLONG_BUFFER
from plain_models import relative_error
from policy_matrix import MODES, SILENT, Case, experience, first_step, gradient, references, responses, rewarded
from splits import Split

from rlhf_suite.data.trajectory import Experience
from rlhf_suite.registry import estimator

pytestmark = pytest.mark.stack  # the tests without ranks too: they need the same models
LIMIT = 1e-5
ESTIMATORS = estimator.names()
CASES = [Case(loss, ESTIMATORS[i % len(ESTIMATORS)], mode) for i, (loss, mode) in enumerate(MODES)]
CASES.append(Case("value", "gae", "token-mean"))
SPLITS = [
    Split("micro-batches of 2", micro=2),
    Split("2 ranks", ranks=2, zero=2, micro=2),
    Split("2 ranks that split the tokens", ranks=2, zero=2, micro=2, sequence=2),
]


@pytest.fixture(scope="module")
def wanted(folder):
    return dict(references(folder, [*CASES, *MISTAKEN], lora=False))


@pytest.mark.notices(
    "the correction never reaches the loss", "rl/objectives.py", "units, batch.correction)", "units)", cases="cispo"
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.mode}")
def test_the_gradient_is_that_of_the_formulas(ranks, folder, wanted, case):
    step = first_step(experience(case, rewarded(folder, case)))
    for split in SPLITS:
        found = ranks(split.ranks).call(gradient, folder, case, split, step)[0]
        assert relative_error(found, wanted[case]) <= LIMIT, split


def test_the_rollout_has_what_the_comparison_is_about(folder):
    """Gaps, a response without model tokens in the step, every kind of shaping, and several turns."""
    batch = rewarded(folder, CASES[0])
    kept = [each for each in responses(folder, CASES[0]) if not each.greedy]
    assert SILENT in first_step(batch).index.tolist() and not len(kept[SILENT])
    assert any(batch.mask[batch.segments == row].diff().eq(1).sum() > 1 for row in range(len(batch)))
    assert any(each.truncated for each in kept) and any(abs(each.score) > CLIP_RANGE[1] for each in kept)
    assert sum(len(each) > each.longest - OVERLONG_BUFFER for each in kept) > 1
    own = batch.mask.bool()
    weights = (batch.old_log_probs - batch.engine_log_probs)[own].exp()
    assert (weights > MAX_WEIGHT).sum() > 5 and (weights < MAX_WEIGHT).sum() > 20


# Mistakes, made on purpose, before credit is assigned or after it; each is seen with one micro-batch per two responses.


def other_groups(batch: Experience) -> Experience:
    return replace(batch, group=batch.group.roll(1))


def kl_upside_down(batch: Experience) -> Experience:
    return replace(batch, ref_log_probs=2 * batch.old_log_probs - batch.ref_log_probs)


def environment_counted(batch: Experience) -> Experience:
    """Everything after the first model token is the model's."""
    mask = batch.mask.clone()
    for row in range(len(batch)):
        own = batch.segments == row
        mask[own] = (mask[own].cumsum(0) > 0).float()
    return replace(batch, mask=mask)


def without(name: str) -> Callable[[Experience], Experience]:
    return lambda batch: replace(batch, **{name: None})


def everything_trained(batch: Experience) -> Experience:
    mask = torch.ones_like(batch.mask).index_fill(0, batch.starts, 0.0)
    return replace(batch, mask=mask)


RLOO, GAE = Case("ppo", "rloo", "token-mean"), Case("ppo", "gae", "token-mean")
CRITIC = Case("value", "gae", "token-mean")
GRPO, DR_GRPO = (Case("ppo", "group_norm", mode) for mode in ("seq-mean-token-mean", "seq-mean-token-sum-norm"))
MISTAKEN = (RLOO, GAE, CRITIC, GRPO, DR_GRPO)
BEFORE = {
    "the baseline of another group": (RLOO, other_groups),
    "the KL penalty with the wrong sign": (RLOO, kl_upside_down),
    "GAE over an environment's tokens": (GAE, environment_counted),
    "returns over an environment's tokens": (CRITIC, environment_counted),
}
AFTER = {
    "old log-probs of the moving policy": (RLOO, without("old_log_probs")),
    "no correction": (RLOO, without("correction")),
    "no mask": (RLOO, everything_trained),
}


@pytest.mark.parametrize("name", [*BEFORE, *AFTER])
def test_the_comparison_sees(ranks, folder, wanted, name):
    case, mistake = (BEFORE | AFTER)[name]
    batch = rewarded(folder, case)
    if name in BEFORE:
        step = experience(case, mistake(batch))
        step = first_step(replace(step, mask=batch.mask))
    else:
        step = first_step(mistake(experience(case, batch)))
    found = ranks(1).call(gradient, folder, case, SPLITS[0], step)[0]
    assert relative_error(found, wanted[case]) > 1000 * LIMIT


def test_the_comparison_sees_a_wrong_divisor(ranks, folder, wanted):
    """The gradient of one aggregation is not that of another, nor of another estimator."""
    step = first_step(experience(GRPO, rewarded(folder, GRPO)))
    for other in (DR_GRPO, replace(GRPO, mode="token-mean")):
        found = ranks(1).call(gradient, folder, other, SPLITS[0], step)[0]
        assert relative_error(found, wanted[GRPO]) > 1000 * LIMIT, other
