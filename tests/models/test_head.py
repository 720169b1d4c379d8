"""The chunked head against log_softmax over all logits at once, and against finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rlhf_suite.models.head import ChunkedLogProbs, HeadSettings, LogitRule, ScoringHead


def inputs(rows: int, bias: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    offset = torch.randn(11, dtype=torch.float64, generator=generator, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(0, 11, (rows,), generator=generator)


def plain(hidden, weight, bias, targets, temperature):
    log_p = F.log_softmax(F.linear(hidden, weight, bias) / temperature, dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.notices(
    "log-probs forget the sampling temperature",
    "models/head.py",
    "    return logits.div_(temperature)",
    "    return logits",
)
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_give_the_same_numbers_and_gradients_as_all_logits_at_once(chunk):
    hidden, weight, bias, targets = inputs(7)
    expected = plain(hidden, weight, bias, targets, 0.7)
    result = ChunkedLogProbs.apply(hidden, weight, bias, targets, HeadSettings(0.7, True, chunk))
    torch.testing.assert_close(result, expected)
    mix = torch.linspace(-1, 1, 7, dtype=torch.float64)
    wanted = torch.autograd.grad((expected[0] * mix + expected[1] * mix**2).sum(), (hidden, weight, bias))
    found = torch.autograd.grad((result[0] * mix + result[1] * mix**2).sum(), (hidden, weight, bias))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_agree_with_finite_differences(entropy):
    hidden, weight, bias, targets = inputs(4)

    def scored(hidden, weight, bias):
        log_probs, entropies = ChunkedLogProbs.apply(hidden, weight, bias, targets, HeadSettings(1.3, entropy, 3))
        return (log_probs, entropies) if entropy else log_probs

    assert torch.autograd.gradcheck(scored, (hidden, weight, bias))


@pytest.mark.notices(
    "the gradient forgets the cap of the logits",
    "models/head.py",
    "return (1 - (capped / self.cap).square_()).mul_(self.scale)",
    "return torch.full_like(capped, self.scale)",
)
@pytest.mark.parametrize("never", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_head_may_scale_and_cap_its_logits(cap, never):
    hidden, weight, bias, targets = inputs(7)
    ban = torch.zeros(11, dtype=torch.float64)
    ban[[3, 5]] = -100.0 * never
    targets = targets.where((targets != 3) & (targets != 5), 0)
    rule = LogitRule(0.5, cap, ban if never else None)

    def scored(hidden, weight, bias):
        return ChunkedLogProbs.apply(hidden, weight, bias, targets, HeadSettings(0.7, True, 3, rule))

    logits = 0.5 * F.linear(hidden, weight, bias)
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) + ban
    log_p = (logits / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(scored(hidden, weight, bias), expected)
    assert torch.autograd.gradcheck(scored, (hidden, weight, bias))


def test_gradient_of_the_entropy_alone():
    hidden, weight, _, targets = inputs(4, bias=False)
    _, entropies = ChunkedLogProbs.apply(hidden, weight, None, targets, HeadSettings(1.0, True, 3))
    wanted = torch.autograd.grad(plain(hidden, weight, None, targets, 1.0)[1].sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(entropies.sum(), (hidden, weight)), wanted)


def test_no_rows_give_empty_results_and_zero_gradients():
    hidden, weight, bias, targets = inputs(0)
    log_probs, entropies = ChunkedLogProbs.apply(hidden, weight, bias, targets, HeadSettings(1.0, True, 3))
    assert log_probs.shape == entropies.shape == (0,)
    (log_probs.sum() + entropies.sum()).backward()
    assert weight.grad.abs().sum() == 0 and bias.grad.abs().sum() == 0


def test_weight_gradients_of_many_bf16_chunks_add_up_in_fp32():
    hidden = torch.ones(2048, 4, dtype=torch.bfloat16)
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.ones(2048, dtype=torch.int64)
    log_probs, _ = ChunkedLogProbs.apply(hidden, weight, None, targets, HeadSettings(1.0, False, 1))
    log_probs.sum().backward()
    assert weight.grad[1, 0].item() == 1024  # every row adds 1/2, which bf16 loses beside 128 and more


def test_logits_of_all_rows_are_never_alive_at_once(monkeypatch):
    seen = []
    linear = F.linear

    def recording(hidden, weight, bias=None):
        seen.append(len(hidden))
        return linear(hidden, weight, bias)

    monkeypatch.setattr(F, "linear", recording)
    hidden, weight, bias, targets = inputs(100)
    ChunkedLogProbs.apply(hidden, weight, bias, targets, HeadSettings(1.0, True, 8))[0].sum().backward()
    assert max(seen) == 8


def test_scoring_head_shares_the_parameters_and_still_gives_logits():
    linear = nn.Linear(5, 11, bias=False)
    head = ScoringHead.of(linear, LogitRule())
    hidden = torch.randn(3, 5)
    assert head.weight is linear.weight and [name for name, _ in head.named_parameters()] == ["weight"]
    torch.testing.assert_close(head(hidden), linear(hidden))
