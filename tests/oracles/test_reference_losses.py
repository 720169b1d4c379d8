"""Losses and their gradients agree with independent implementations; where one differs, the test says why."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from reference import ROWS, SEGMENTS, STEPS, Case, cases, check, gap

from rlhf_suite.algo.correction import CorrectionInput, correction_weights
from rlhf_suite.algo.kl import estimate_kl, estimate_unbiased_kl
from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.losses.policy import PolicyTokens, policy_term
from rlhf_suite.losses.reduce import num_units, token_weights, weighted_sum
from rlhf_suite.losses.tokens import next_token_loss, value_loss

TOKEN, SEQUENCE, NORMED = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"


def policy(case: Case, config: ActorConfig, advantages: str = "adv", correction: torch.Tensor | None = None):
    """Loss as its mean over units, gradient with respect to logp, metrics as numbers."""
    mask, log_probs = case.flat("mask"), case.flat("logp").requires_grad_()
    weights = token_weights(mask, SEGMENTS, ROWS, config.loss_agg_mode, horizon=STEPS).double()
    units = num_units(mask, SEGMENTS, ROWS, config.loss_agg_mode)
    given = case.flat("adv") if advantages == "adv" else case.fields[advantages][SEGMENTS]
    tokens = PolicyTokens(log_probs, case.flat("old_logp"), given, mask, SEGMENTS, ROWS)
    result = policy_term(tokens, config, weights, units, correction)
    loss = result.total / units
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.detach(), gradient, {name: mean.total / mean.count for name, mean in result.metrics.items()}


HIGHER = [0.2, 0.28]
AGREEING = {
    "openrlhf/policy_loss/ppo": ActorConfig.of("ppo"),
    "openrlhf/policy_loss/ppo_seq_agg": ActorConfig.of("ppo", loss_agg_mode=SEQUENCE),
    "openrlhf/policy_loss/ppo_clip_higher": ActorConfig.of("ppo", eps_clip_low_high=HIGHER),
    "openrlhf/policy_loss/dual_clip3": ActorConfig.of("ppo", dual_clip=3.0),
    "verl/policy_loss/vanilla_dual_off/token-mean": ActorConfig.of("ppo"),
    "verl/policy_loss/vanilla/token-mean": ActorConfig.of("ppo", dual_clip=3.0),  # verl's default has dual clip 3
    "verl/policy_loss/vanilla/seq-mean-token-mean": ActorConfig.of("ppo", dual_clip=3.0, loss_agg_mode=SEQUENCE),
    "verl/policy_loss/vanilla_clip_higher/token-mean": ActorConfig.of("ppo", dual_clip=3.0, eps_clip_low_high=HIGHER),
    "verl/policy_loss/vanilla_dual_off/seq-mean-token-mean": ActorConfig.of("ppo", loss_agg_mode=SEQUENCE),
    "verl/policy_loss/vanilla_clip_higher/seq-mean-token-mean": ActorConfig.of(
        "ppo", dual_clip=3.0, eps_clip_low_high=HIGHER, loss_agg_mode=SEQUENCE
    ),
    "trl/policy_loss/dapo_tokenadv": ActorConfig.of("ppo"),
    "trl/policy_loss/dapo_clip_higher_tokenadv": ActorConfig.of("ppo", eps_clip_low_high=HIGHER),
    "trl/policy_loss/dapo_delta3_tokenadv": ActorConfig.of("ppo", dual_clip=3.0),
    "verl/policy_loss/cispo/token-mean": ActorConfig.of("ppo", policy_loss_type="cispo", eps_clip_low_high=[1.0, 0.28]),
    "trl/policy_loss/cispo_tokenadv_cap1.28": ActorConfig.of(
        "ppo", policy_loss_type="cispo", eps_clip_low_high=[1.0, 0.28]
    ),
    "verl/policy_loss/sapo/seq-mean-token-mean": ActorConfig.of("ppo", policy_loss_type="sapo", loss_agg_mode=SEQUENCE),
    "verl/policy_loss/gpg/token-mean": ActorConfig.of("ppo", policy_loss_type="reinforce"),
    "verl/policy_loss/gspo/seq-mean-token-mean": ActorConfig.of(
        "ppo", policy_loss_type="gspo", loss_agg_mode=SEQUENCE, eps_clip_low_high=[3e-4, 4e-4]
    ),
    "verl/policy_loss/gspo_wide/seq-mean-token-mean": ActorConfig.of(
        "ppo", policy_loss_type="gspo", loss_agg_mode=SEQUENCE
    ),
}


@pytest.mark.parametrize("reference", AGREEING)
def test_ppo_loss_gradient_and_metrics_agree(reference):
    for case in cases(reference):
        loss, gradient, metrics = policy(case, AGREEING[reference])
        check(loss, case.outputs["loss"])
        check(gradient, case.outputs["grad"], case.fields["mask"])
        check(metrics["policy_loss"], case.outputs["loss"])
        for theirs, ours in (("clip_ratio", "ppo_clip_ratio"), ("ppo_kl", "ppo_kl")):
            if theirs in case.outputs:
                check(metrics[ours], case.outputs[theirs])


def test_ppo_loss_agrees_with_the_ppo_trainer_of_trl():
    for case in cases("trl_1.12/ppo_losses"):
        loss, gradient, _ = policy(case, ActorConfig.of("ppo"))
        check(loss, case.outputs["pg_loss"])
        check(gradient, case.outputs["pg_grad"], case.fields["mask"])


def test_sequence_mean_agrees_with_trl_but_for_empty_rows_which_trl_counts():
    reference = "trl/policy_loss/grpo_tokenadv"
    for case in cases(reference, "contiguous", "gaps"):
        loss, gradient, _ = policy(case, ActorConfig.of("ppo", loss_agg_mode=SEQUENCE))
        check(loss, case.outputs["loss"])
        check(gradient, case.outputs["grad"], case.fields["mask"])
    for case in cases(reference, "empty row"):
        loss, gradient, _ = policy(case, ActorConfig.of("ppo", loss_agg_mode=SEQUENCE))
        check(loss * 7 / 8, case.outputs["loss"])
        check(gradient * 7 / 8, case.outputs["grad"], case.fields["mask"])


GSPO = ActorConfig.of("ppo", policy_loss_type="gspo", loss_agg_mode=SEQUENCE)


@pytest.mark.parametrize(
    ("reference", "kinds"),
    [
        ("openrlhf/policy_loss/gspo_wide_seqadv", ()),
        ("verl/policy_loss/gspo_wide_seqadv/seq-mean-token-mean", ()),
        ("trl/policy_loss/gspo_grpo_seqadv", ("contiguous", "gaps")),
    ],
)
def test_gspo_agrees_where_a_sequence_has_one_advantage(reference, kinds):
    for case in cases(reference, *kinds):
        loss, gradient, _ = policy(case, GSPO, "adv_seq")
        check(loss, case.outputs["loss"])
        check(gradient, case.outputs["grad"], case.fields["mask"])


@pytest.mark.parametrize(("reference", "clip"), [("gspo_wide", [0.2, 0.2]), ("gspo", [3e-4, 4e-4])])
def test_openrlhf_lets_the_gradient_of_a_gspo_token_reach_the_whole_sequence(reference, clip):
    """Where advantages differ between tokens the paper stops it; the losses are the same."""
    for case in cases(f"openrlhf/policy_loss/{reference}"):
        loss, gradient, _ = policy(case, replace(GSPO, eps_clip_low_high=clip))
        check(loss, case.outputs["loss"])
        assert gap(gradient.view(8, 10), case.outputs["grad"], case.fields["mask"]) > 1e-3


def test_sapo_agrees_with_trl():
    for case in cases("trl/policy_loss/sapo_tokenadv", "contiguous", "gaps"):
        loss, gradient, _ = policy(case, ActorConfig.of("ppo", policy_loss_type="sapo", loss_agg_mode=SEQUENCE))
        check(loss, case.outputs["loss"])
        check(gradient, case.outputs["grad"], case.fields["mask"])


def test_dr_grpo_agrees_with_trl():
    for case in cases("trl/policy_loss/dr_grpo", "contiguous", "gaps"):
        loss, gradient, _ = policy(case, ActorConfig.of("ppo", loss_agg_mode=NORMED), "adv_seq")
        check(loss, case.outputs["loss"])
        check(gradient, case.outputs["grad"], case.fields["mask"])


def correction(**settings) -> AdvantageConfig:
    return AdvantageConfig(**{f"is_correction_{name}": value for name, value in settings.items()})


CORRECTIONS = {
    "is_token_mask": correction(level="token"),
    "is_token_clip": correction(level="token", mode="clip"),
    "is_seq_mask": correction(level="seq", threshold=[0.8, 1.2]),
    "is_token_bkl": correction(level="token", gating="binary_kl", threshold=[0.05]),
    "is_seq_bkl": correction(level="seq", gating="binary_kl", threshold=[0.02]),
    "is_token_tv": correction(level="token", gating="tv", threshold=[0.1]),
}


def weights_of(case: Case, config: AdvantageConfig):
    given = CorrectionInput(
        case.flat("old_logp"), case.flat("rollout_logp"), case.flat("mask"), torch.bincount(SEGMENTS, minlength=ROWS)
    )
    return correction_weights(given, config)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrected_losses_agree_with_openrlhf(name):
    for case in cases(f"openrlhf/policy_loss/{name}"):
        loss, gradient, _ = policy(case, ActorConfig.of("ppo"), correction=weights_of(case, CORRECTIONS[name]))
        check(loss, case.outputs["loss"])
        check(gradient, case.outputs["grad"], case.fields["mask"])


@pytest.mark.parametrize(
    ("reference", "config"),
    [
        ("verl/is_weights/token/2.0", correction(level="token", mode="clip", threshold=[2.0])),
        ("trl/is_weights/token_truncate/None_2.0", correction(level="token", mode="clip", threshold=[2.0])),
        ("trl/is_weights/token_mask/0.5_5.0", correction(level="token")),
        ("verl/is_weights/token/0.5_5.0", correction(level="token")),
    ],
)
def test_importance_weights_agree(reference, config):
    for case in cases(reference):
        check(weights_of(case, config), case.outputs["w"], case.fields["mask"])


@pytest.mark.parametrize(("reference", "level"), [("token_k1", "token"), ("seq_mean_k1", "seq")])
def test_what_a_band_drops_agrees_with_verl(reference, level):
    config = correction(level=level, threshold=[0.8, 1.25])
    for case in cases(f"verl/rejection/{reference}/0.8_1.25"):
        check((weights_of(case, config) > 0).double(), case.outputs["mask"], case.fields["mask"])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_kl_gradient_agrees_with_verl_on_policy(estimator):
    """verl has no weight for samples of an older policy."""
    for case in cases(f"verl/kl/{estimator}+"):
        log_probs = case.flat("logp").requires_grad_()
        kl = estimate_unbiased_kl(log_probs, case.flat("ref_logp"), log_probs.detach(), estimator)
        check(kl.detach(), case.outputs["kl"], case.fields["mask"])
        (gradient,) = torch.autograd.grad((kl * case.flat("mask")).sum(), log_probs)
        check(gradient, case.outputs["grad"], case.fields["mask"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_unbiased_kl_gradient_agrees_with_openrlhf(estimator):
    for case in cases(f"openrlhf/kl_unbiased/{estimator}"):
        mask, log_probs = case.flat("mask"), case.flat("logp").requires_grad_()
        kl = estimate_unbiased_kl(log_probs, case.flat("ref_logp"), case.flat("old_logp"), estimator)
        check(kl.detach(), case.outputs["kl"], case.fields["mask"])
        (gradient,) = torch.autograd.grad((kl * mask).sum(), log_probs)
        check(gradient, case.outputs["grad"], case.fields["mask"])


@pytest.mark.parametrize("name", ["mask", "old_logp", "adv"])
def test_the_comparison_notices_a_wrong_input(name):
    """A loss that ignored its mask, old log-probs or advantages could not pass the tests above."""
    case = cases("openrlhf/policy_loss/ppo")[0]
    broken = case._replace(fields={**case.fields, name: torch.ones_like(case.fields[name])})
    _, gradient, _ = policy(broken, ActorConfig.of("ppo"))
    assert gap(gradient.view(8, 10), case.outputs["grad"], case.fields["mask"]) > 1e-3


@pytest.mark.parametrize(
    ("reference", "mode"),
    [
        ("openrlhf/aggregate_loss/token", TOKEN),
        ("openrlhf/aggregate_loss/seq", SEQUENCE),
        ("verl/agg_loss/token-mean", TOKEN),
        ("verl/agg_loss/seq-mean-token-mean", SEQUENCE),
        ("verl/agg_loss/seq-mean-token-sum-norm", NORMED),
    ],
)
def test_aggregation_agrees(reference, mode):
    for case in cases(reference):
        mask = case.flat("mask")
        total = weighted_sum(case.flat("adv"), token_weights(mask, SEGMENTS, ROWS, mode, horizon=STEPS).double())
        check(total / num_units(mask, SEGMENTS, ROWS, mode), case.outputs["loss"])


@pytest.mark.parametrize("reference", ["openrlhf/sft_loss/token", "trl/sft_loss/nll"])
def test_next_token_loss_agrees(reference):
    for case in cases(reference):
        mask, log_probs = case.flat("mask"), case.flat("logp").requires_grad_()
        loss = next_token_loss(log_probs, mask).total / mask.sum()
        (gradient,) = torch.autograd.grad(loss, log_probs)
        check(loss.detach(), case.outputs["loss"])
        check(gradient, case.outputs["grad"], case.fields["mask"])


@pytest.mark.parametrize(
    ("reference", "clip", "loss_name", "grad_name"),
    [
        ("openrlhf/value_loss/clip=0.2/token", 0.2, "loss", "grad"),
        ("openrlhf/value_loss/clip=None/token", math.inf, "loss", "grad"),
        ("verl/value_loss/clip=0.2/token-mean", 0.2, "loss", "grad"),
        ("trl_1.12/ppo_losses", 0.2, "vf_loss", "vf_grad"),
    ],
)
def test_value_loss_agrees(reference, clip, loss_name, grad_name):
    for case in cases(reference):
        mask, values = case.flat("mask"), case.flat("values").requires_grad_()
        loss = value_loss(values, case.flat("old_values"), case.flat("returns"), mask, (clip, clip)).total / mask.sum()
        (gradient,) = torch.autograd.grad(loss, values)
        check(loss.detach(), case.outputs[loss_name])
        check(gradient, case.outputs[grad_name], case.fields["mask"])


@pytest.mark.parametrize("system", ["openrlhf", "verl"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_agree(system, estimator):
    for case in cases(f"{system}/kl/{estimator}"):
        kl = estimate_kl(case.fields["logp"], case.fields["ref_logp"], estimator)
        check(kl, case.outputs["kl"], case.fields["mask"])
