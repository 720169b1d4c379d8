"""Losses of the supervised and preference tasks, and their gradients, agree with independent implementations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference import check, tensors

from rlhf_suite.config.algo_supervised import DPOAlgoConfig
from rlhf_suite.losses.preference import Answers, preference_loss, reward_loss

DATA = json.loads((Path(__file__).parent / "supervised.json").read_text())


def cases(name):
    """(inputs, outputs) of a reference, case by case."""
    reference = DATA["references"][name]
    inputs = DATA["cases"][reference["case"]]
    return [(tensors(case), tensors(out)) for case, out in zip(inputs, reference["outputs"], strict=True)]


def answers(case, side, log_probs):
    mask = case[f"{side}_mask"]
    return Answers(log_probs, (case[f"{side}_ref"] * mask).sum(1), mask.sum(1))


def dpo(case, config):
    """Mean loss, its gradients with respect to the sums of log-probs, metrics."""
    sums = [(case[f"{side}_logp"] * case[f"{side}_mask"]).sum(1).requires_grad_() for side in ("chosen", "rejected")]
    pair = [answers(case, side, value) for side, value in zip(("chosen", "rejected"), sums, strict=True)]
    result = preference_loss(*pair, torch.ones(len(sums[0])), config)
    loss = result.total / len(sums[0])
    return loss.detach(), torch.autograd.grad(loss, sums), pair, result.metrics


AGREEING = {
    "openrlhf/dpo/dpo": DPOAlgoConfig(),
    "openrlhf/dpo/cdpo": DPOAlgoConfig(label_smoothing=0.1),
    "openrlhf/dpo/ipo": DPOAlgoConfig(loss="ipo"),
    "trl/dpo/sigmoid": DPOAlgoConfig(),
    "trl/dpo/hinge": DPOAlgoConfig(loss="hinge"),
}


@pytest.mark.parametrize("name", AGREEING)
def test_preference_losses_agree(name):
    for case, theirs in cases(name):
        loss, gradients, pair, metrics = dpo(case, AGREEING[name])
        check(loss, theirs["loss"])
        for side, gradient in zip(("chosen", "rejected"), gradients, strict=True):
            check(gradient, theirs[f"grad_{side}"])
        for side, ours, kind in zip(("chosen", "rejected"), pair, ("chosen_reward", "reject_reward"), strict=True):
            if f"{side}_rewards" in theirs:
                check(0.1 * ours.log_ratios.detach(), theirs[f"{side}_rewards"])
                check(metrics[kind].total / metrics[kind].count, theirs[f"{side}_rewards"].mean())


def test_trl_averages_ipo_over_tokens_where_the_paper_and_openrlhf_sum():
    for case, theirs in cases("trl/dpo/ipo"):
        assert abs(float(dpo(case, DPOAlgoConfig(loss="ipo"))[0] - theirs["loss"])) > 1e-2


@pytest.mark.parametrize(
    ("name", "kind", "with_margin"),
    [
        ("openrlhf/rm/pairwise", "sigmoid", False),
        ("openrlhf/rm/pairwise_margin", "sigmoid", True),
        ("openrlhf/rm/logexp", "logexp", False),
        ("trl/rm/pairwise", "sigmoid", False),
        ("trl/rm/pairwise", "logexp", False),
        ("trl/rm/pairwise_margin", "sigmoid", True),
    ],
)
def test_reward_model_losses_agree(name, kind, with_margin):
    for case, theirs in cases(name):
        chosen, rejected = case["chosen"].requires_grad_(), case["rejected"]
        margin = case["margin"] if with_margin else torch.zeros_like(chosen)
        loss = reward_loss(chosen, rejected, margin, torch.ones_like(chosen), kind).total / len(chosen)
        check(loss.detach(), theirs["loss"])
        if "grad" in theirs:
            check(torch.autograd.grad(loss, chosen)[0], theirs["grad"])
