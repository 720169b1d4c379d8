"""Divergences by hand and by what holds for every pair of distributions."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_suite.losses.distillation import with_others
from rlhf_suite.registry import divergence


def distributions(seed=0, rows=50, outcomes=7):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, outcomes, generator=generator).double().log_softmax(-1) for _ in range(2))


@pytest.mark.notices(
    "teacher and student change places",
    "losses/distillation.py",
    "    return kl(teacher, student)",
    "    return kl(student, teacher)",
)
def test_two_outcomes_by_hand():
    p, q = (torch.tensor([[x, 1 - x]], dtype=torch.float64).log() for x in (0.5, 0.25))
    forward, reverse = 0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert float(divergence.load("forward_kl")(p, q)) == pytest.approx(forward)
    assert float(divergence.load("reverse_kl")(p, q)) == pytest.approx(reverse)
    m = [0.375, 0.625]
    middle = sum(x * math.log(x / y) for x, y in zip((0.5, 0.5, 0.25, 0.75), m * 2, strict=True)) / 2
    assert float(divergence.load("jsd")(p, q)) == pytest.approx(middle)


@pytest.mark.parametrize("name", divergence.names())
def test_merging_outcomes_never_raises_a_divergence_and_merging_none_keeps_it(name):
    p, q = distributions()
    whole = divergence.load(name)(p, q)
    order = p.argsort(-1, descending=True)
    p, q = p.gather(1, order), q.gather(1, order)
    for k in range(1, 7):
        merged = divergence.load(name)(with_others(p[:, :k]), with_others(q[:, :k]))
        assert (merged <= whole + 1e-9).all() and (merged >= 0).all()
    torch.testing.assert_close(divergence.load(name)(with_others(p), with_others(q)), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", divergence.names())
def test_a_token_that_the_teacher_rules_out_gives_no_nan(name):
    p = torch.tensor([[0.0, -torch.inf]], dtype=torch.float64)
    q = torch.tensor([[0.3, 0.7]], dtype=torch.float64).log().requires_grad_()
    (gradient,) = torch.autograd.grad(divergence.load(name)(p, q).sum(), q)
    assert torch.isfinite(gradient).all()
