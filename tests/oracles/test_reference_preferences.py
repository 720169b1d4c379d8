"""Losses of the supervised and preference tasks, and their gradients, agree with independent implementations."""

from __future__ import annotations

import pytest
import torch
from reference import check, gap
from reference import supervised_cases as cases

from rlhf_suite import registry
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.losses.distillation import forward_kl
from rlhf_suite.losses.preference import Answers, kto_loss, preference_term, reference_point, reward_term
from rlhf_suite.losses.tokens import step_loss


def answers(case, side, log_probs):
    mask = case[f"{side}_mask"]
    return Answers(log_probs, (case[f"{side}_ref"] * mask).sum(1), mask.sum(1))


def dpo(case, config):
    """Mean loss, its gradients with respect to the sums of log-probs, metrics."""
    sums = [(case[f"{side}_logp"] * case[f"{side}_mask"]).sum(1).requires_grad_() for side in ("chosen", "rejected")]
    pair = [answers(case, side, value) for side, value in zip(("chosen", "rejected"), sums, strict=True)]
    result = preference_term(*pair, torch.ones(len(sums[0])), config)
    loss = result.total / len(sums[0])
    return loss.detach(), torch.autograd.grad(loss, sums), pair, result.metrics


AGREEING = {
    "openrlhf/dpo/dpo": AlgoConfig.of("dpo"),
    "openrlhf/dpo/cdpo": AlgoConfig.of("dpo", label_smoothing=0.1),
    "openrlhf/dpo/ipo": AlgoConfig.of("dpo", loss="ipo"),
    "trl/dpo/sigmoid": AlgoConfig.of("dpo"),
    "trl/dpo/hinge": AlgoConfig.of("dpo", loss="hinge"),
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
        assert gap(dpo(case, AlgoConfig.of("dpo", loss="ipo"))[0], theirs["loss"], torch.ones(())) > 1e-2


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
        loss = reward_term(chosen, rejected, margin, torch.ones_like(chosen), kind).total / len(chosen)
        check(loss.detach(), theirs["loss"])
        if "grad" in theirs:
            check(torch.autograd.grad(loss, chosen)[0], theirs["grad"])


def log_ratios(case, prefix="", names=("mask", "logp", "ref")):
    mask, log_probs, reference = (case[prefix + name] for name in names)
    return ((log_probs - reference) * mask).sum(1)


@pytest.mark.parametrize("system", ["openrlhf_v0.9.0", "trl"])
@pytest.mark.parametrize("weight", [1.0, 1.33])
def test_kto_agrees(system, weight):
    for case, theirs in cases(f"{system}/kto/w=1.0,{weight}"):
        ratios = log_ratios(case).requires_grad_()
        kl = log_ratios(case, "kl_")
        point = reference_point(kl.sum(), torch.tensor(float(len(kl))))
        config = AlgoConfig.of("kto", undesirable_loss_weight=weight)
        counted = torch.ones(len(ratios))
        result = kto_loss(ratios, case["label"], point.expand(len(ratios)), counted, config)
        loss = result.total / len(ratios)
        check(point, theirs["kl"])
        check(loss.detach(), theirs["loss"])
        check(torch.autograd.grad(loss, ratios)[0], theirs["grad"])


def test_vanilla_kto_agrees():
    for case, theirs in cases("openrlhf_v0.9.0/kto_vanilla"):
        chosen, rejected = log_ratios(case, "chosen_"), log_ratios(case, "rejected_")
        count = torch.tensor(float(len(chosen)))
        points = [reference_point(each.sum(), count).expand(len(chosen)) for each in (rejected, chosen)]
        labels = torch.cat([torch.ones_like(chosen), torch.zeros_like(rejected)])
        ones = torch.ones(len(labels))
        result = kto_loss(torch.cat([chosen, rejected]), labels, torch.cat(points), ones, AlgoConfig.of("kto"))
        check(result.total / len(labels), theirs["loss"])


@pytest.mark.parametrize(
    ("name", "columns", "soft"), [("hard_vocab", None, False), ("hard", [9, 10], False), ("soft", [9, 10], True)]
)
def test_step_losses_agree(name, columns, soft):
    for case, theirs in cases(f"openrlhf_v0.9.0/prm/{name}"):
        labels = case["soft_labels" if soft else "labels"]
        at = labels != -100
        logits = case["logits"].requires_grad_()
        rows, labels = logits[at], labels[at]
        targets, weights = (torch.zeros_like(labels), labels) if soft else (labels, torch.ones_like(labels))
        if columns is not None:
            rows = rows[:, columns]
            targets = targets if soft else targets - columns[0]
        result = step_loss(rows, targets.long(), weights)
        loss = result.total / at.sum()
        check(loss.detach(), theirs["loss"])
        check((result.metrics["acc"].total / result.metrics["acc"].count).double(), theirs["acc"])
        check(torch.autograd.grad(loss, logits)[0], theirs["grad"])


def divergence(case, function):
    """The mean over labelled tokens, and its gradient with respect to the student's logits."""
    at = case["labels"] != -100
    student = case["student"].requires_grad_()
    losses = function(case["teacher"][at].log_softmax(-1), student[at].log_softmax(-1))
    return losses.mean().detach(), torch.autograd.grad(losses.mean(), student)[0]


@pytest.mark.parametrize(("beta", "name"), [("0.0", "forward_kl"), ("0.5", "jsd"), ("1.0", "reverse_kl")])
@pytest.mark.parametrize("reference", ["gkd_jsd", "chunked"])
def test_divergences_agree(beta, name, reference):
    for case, theirs in cases(f"trl/distill/{reference}_beta={beta}"):
        loss, gradient = divergence(case, registry.divergence.load(name))
        check(loss, theirs["loss"])
        check(gradient, theirs["grad"])


def test_the_distillation_loss_of_openrlhf_is_the_forward_kl_and_the_entropy_of_the_teacher():
    for case, theirs in cases("openrlhf_v0.9.0/kd"):
        loss, gradient = divergence(case, forward_kl)
        teacher = case["teacher"][case["labels"] != -100].log_softmax(-1)
        check(loss - (teacher.exp() * teacher).sum(-1).mean(), theirs["loss"])
        check(gradient, theirs["grad"])
