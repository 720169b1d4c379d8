"""Every policy loss under every aggregation has the gradient of its formula, whatever splits the step up."""

from __future__ import annotations

from dataclasses import replace

import gradients
import pytest
import torch
from plain_models import formula_gradient, outputs, reference_model, relative_error
from policy_formulas import CLIP, HORIZON, OBJECTIVES, TEMPERATURE, Sequence
from splits import Split

from rlhf_suite.config.actor import PolicyConfig
from rlhf_suite.config.algo import KLConfig
from rlhf_suite.rl.objectives import PolicyObjective

TAU = {True: 0.7, False: 1.3}  # where the advantage is positive, and elsewhere
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES = [("gspo", "seq-mean-token-mean"), *((name, mode) for name in ("cispo", "sapo", "reinforce") for mode in MODES)]
LOSSES.append(("ppo", "seq-mean-token-sum-norm"))  # its other modes are in test_gradient_equality.py
LIMIT = 1e-5


def name_of(loss, mode):
    return f"{loss}, {mode}, corrected"


def gradient(world, folder, loss, mode, split, batch):
    """As `gradients.gradient`; runs on the ranks."""
    actor = PolicyConfig(
        policy_loss_type=loss,
        loss_agg_mode=mode,
        eps_clip_low_high=list(CLIP),
        sapo_tau_pos=TAU[True],
        sapo_tau_neg=TAU[False],
    )
    OBJECTIVES[name_of(loss, mode)] = PolicyObjective(actor, KLConfig(), TEMPERATURE, HORIZON)
    return gradients.gradient(world, folder, name_of(loss, mode), split, batch)


def token_terms(loss, s):
    """The loss of each token of a sequence, [L-1]."""
    log_ratio, mask = s.log_probs - s.old_log_probs, s.mask
    if loss == "reinforce":
        return -s.advantages * s.log_probs
    if loss == "gspo":  # what a token's own log-prob does to the sequence's ratio, times the length
        mean = ((log_ratio * mask).sum() / mask.sum()).detach()
        ratio = torch.exp(mean) * torch.exp(s.log_probs - s.log_probs.detach())
    else:
        ratio = torch.exp(log_ratio)
    bounded = torch.minimum(torch.maximum(ratio, torch.tensor(1 - CLIP[0])), torch.tensor(1 + CLIP[1]))
    if loss == "cispo":
        return -bounded.detach() * s.advantages * s.log_probs
    if loss == "sapo":
        tau = torch.tensor([TAU[bool(a > 0)] for a in s.advantages], dtype=torch.float64)
        return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * s.advantages
    return -torch.minimum(ratio * s.advantages, bounded * s.advantages)


def formula(loss, mode, sequences):
    """The step's loss over all sequences."""
    chosen = [s for s in sequences if s.mask.sum() > 0]
    sums = [(token_terms(loss, s) * s.correction * s.mask).sum() for s in chosen]
    sizes = [float(s.mask.sum()) for s in chosen]
    if mode == "token-mean":
        return sum(sums) / sum(sizes)
    divisors = [HORIZON] * len(sizes) if mode == "seq-mean-token-sum-norm" else sizes
    return sum(part / divisor for part, divisor in zip(sums, divisors, strict=True)) / len(chosen)


def wanted(folder, loss, mode, batch):
    """The gradient of the formula in float64."""

    def total(model):
        logits = [outputs(model, "lm", batch.ids[batch.segments == row]) for row in range(len(batch))]
        each = [(out / TEMPERATURE).log_softmax(-1) for out in logits]
        return formula(loss, mode, [Sequence(batch, row, out) for row, out in enumerate(each)])

    return formula_gradient(reference_model(folder, "lm"), False, total)


@pytest.fixture(scope="module")
def corrected(batch):
    """With a correction that drops a third of the tokens."""
    generator = torch.Generator().manual_seed(3)
    weight = (2 * torch.rand(batch.num_tokens, generator=generator) - 0.6).clamp(min=0)
    return replace(batch, tokens={**batch.tokens, "correction": weight})


SPLITS = {1: Split("micro-batches of 2", micro=2), 2: Split("2 ranks", ranks=2, zero=2, micro=2)}


@pytest.mark.parametrize(("loss", "mode"), LOSSES)
def test_the_gradient_is_that_of_the_formula(ranks, folder, corrected, loss, mode):
    right = wanted(folder, loss, mode, corrected)
    for size, split in SPLITS.items():
        found = ranks(size).call(gradient, folder, loss, mode, split, corrected)[0]
        assert relative_error(found, right) <= LIMIT, split


def test_aggregations_differ(folder, corrected):
    """So a mode that was taken for another could not pass."""
    first, second, third = (wanted(folder, "cispo", mode, corrected) for mode in MODES)
    for one, other in ((first, second), (first, third), (second, third)):
        assert relative_error(one, other) > 0.05
