"""What policy and critic count and report; their gradients are proven in tests/train/test_gradient_equality.py."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import ClassVar

import pytest
import torch

from rlhf_suite.config.declarations.algo import KLConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import ActorConfig, CriticConfig
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.load import load_model
from rlhf_suite.rl.model_groups import CriticGroup, PolicyGroup
from rlhf_suite.rl.objectives import PolicyObjective, ValueObjective

DS = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True)
MASK = [0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0]  # of sequences of 4, 5 and 2 tokens, the last without a masked one


@pytest.fixture(scope="module")
def model():
    return load_model("builtin:tiny", head="lm", ds=DS)


@pytest.fixture
def batch(model) -> Experience:
    """On policy, with the policy itself for a reference."""
    plain = Experience(torch.arange(40, 51), torch.tensor([4, 5, 2]), torch.tensor(MASK).float())
    with torch.no_grad():
        own = token_log_probs(model, plain).log_probs
    return replace(plain, old_log_probs=own, ref_log_probs=own, advantages=torch.linspace(-1, 2, 11))


def objective(kl: KLConfig | None = None, **actor) -> PolicyObjective:
    return PolicyObjective(ActorConfig.of("ppo", **actor), kl or KLConfig(), temperature=1.0, horizon=8, kl_coef=0.1)


def test_units_are_masked_tokens_and_sequences_that_have_one(batch):
    for mode, units in (("token-mean", 5), ("seq-mean-token-mean", 2), ("seq-mean-token-sum-norm", 2)):
        found = objective(loss_agg_mode=mode).units(batch)
        assert {name: float(count) for name, count in found.items()} == {"tokens": 5, "policy_units": units}
    assert float(ValueObjective(CriticConfig.of("ppo")).units(batch)["tokens"]) == 5


def test_on_policy_the_loss_is_minus_the_advantages(model, batch):
    chosen = torch.linspace(-1, 2, 11)[torch.tensor(MASK).bool()]
    loss = objective().loss(model, batch)
    assert loss.sums["tokens"].item() == pytest.approx(-float(chosen.sum()), rel=1e-5)
    assert float(loss.metrics["ppo_clip_ratio"].total) == 0
    by_sequence = objective(loss_agg_mode="seq-mean-token-mean").loss(model, batch)
    means = chosen[:2].mean() + chosen[2:].mean()
    assert by_sequence.sums["policy_units"].item() == pytest.approx(-float(means), rel=1e-5)
    assert by_sequence.sums["tokens"].item() == 0
    normed = objective(loss_agg_mode="seq-mean-token-sum-norm").loss(model, batch)
    assert normed.sums["policy_units"].item() == pytest.approx(-float(chosen.sum()) / 8, rel=1e-5)


def test_only_what_is_asked_for_is_computed_and_reported(model, batch):
    clip = {"ppo_clip_ratio", "ppo_clip_ratio_low", "ppo_clip_ratio_high"}
    assert set(objective().loss(model, batch).metrics) == {"policy_loss", "ppo_kl", *clip}
    more = objective(KLConfig(use_loss=True, estimator="k2"), entropy_coef=0.0).loss(model, batch)
    assert set(more.metrics) == {"policy_loss", "ppo_kl", "kl_loss", "entropy", *clip}
    assert float(more.metrics["kl_loss"].total) == 0


def test_an_entropy_coefficient_of_0_only_reports(model, batch):
    plain, logged = objective().loss(model, batch), objective(entropy_coef=0.0).loss(model, batch)
    assert plain.sums["tokens"].item() == pytest.approx(logged.sums["tokens"].item(), rel=1e-6)
    bonus = objective(entropy_coef=0.5).loss(model, batch)
    entropy = logged.metrics["entropy"]
    assert float(entropy.count) == 5
    assert 0 < float(entropy.total) / 5 < 6
    wanted = plain.sums["tokens"].item() - 0.5 * float(entropy.total)
    assert bonus.sums["tokens"].item() == pytest.approx(wanted, rel=1e-5)


def test_kl_in_the_loss_pulls_towards_the_reference(model, batch):
    """k3 of a reference that likes every token less by 0.1: exp(-0.1) - 1 + 0.1 a token."""
    batch = replace(batch, ref_log_probs=batch.ref_log_probs - 0.1)
    plain = objective().loss(model, batch)
    pulled = objective(KLConfig(use_loss=True, estimator="k3")).loss(model, batch)
    k3 = 2.718281828459045**-0.1 - 1 + 0.1
    assert float(pulled.metrics["kl_loss"].total) == pytest.approx(5 * k3, rel=1e-3)
    assert (pulled.sums["tokens"] - plain.sums["tokens"]).item() == pytest.approx(0.1 * 5 * k3, rel=1e-3)


def test_without_old_log_probs_the_gradient_is_that_of_the_unmoved_policy(model, batch):
    unmoved = replace(batch, old_log_probs=None, engine_log_probs=batch.old_log_probs + 0.25)
    weight = model.model.get_input_embeddings().weight
    gradients = []
    for given in (batch, unmoved):
        loss = objective().loss(model, given)
        (gradient,) = torch.autograd.grad(loss.sums["tokens"], weight)
        gradients.append(gradient)
    assert torch.allclose(*gradients, rtol=1e-6, atol=1e-8)
    gap = loss.metrics["engine_gap"]
    assert float(gap.total / gap.count) == pytest.approx(0.25, rel=1e-4)


class Recorded(Experience):
    """A batch that keeps the names of what is read of it."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name):
        Recorded.read.add(name)
        return super().__getattribute__(name)


def test_updates_read_no_column_that_stays_with_the_driver(model, batch):
    every = replace(batch, values=batch.mask, returns=batch.mask, correction=batch.mask, engine_log_probs=batch.mask)
    recorded = Recorded(**{each.name: getattr(every, each.name) for each in fields(every)})
    policies = [objective(KLConfig(use_loss=True), entropy_coef=0.1), objective(loss_agg_mode="seq-mean-token-mean")]
    values = ValueObjective(CriticConfig.of("ppo"))
    critic = load_model("builtin:tiny", head="value", ds=DS)
    for group, cases in ((PolicyGroup, [(each, model) for each in policies]), (CriticGroup, [(values, critic)])):
        Recorded.read.clear()
        for each, own_model in cases:
            each.units(recorded)
            each.loss(own_model, recorded)
        assert "mask" in Recorded.read and not Recorded.read & {*group.unread}
    assert {"values", "returns"} <= Recorded.read


@pytest.mark.notices(
    "a steered entropy bonus has the coefficient of its start",
    "rl/objectives.py",
    "if self.adapted_entropy_coef is None else self.adapted_entropy_coef",
    "if self.adapted_entropy_coef is None else self.actor.entropy_coef",
)
def test_a_steered_entropy_bonus_has_the_coefficient_of_the_step(model, batch):
    steered = objective(entropy_coef=0.0)
    plain = steered.loss(model, batch)
    steered.adapted_entropy_coef = 0.5
    loss = steered.loss(model, batch)
    entropy = float(plain.metrics["entropy"].total)
    assert entropy > 1 and float(loss.metrics["entropy"].total) == entropy
    assert loss.sums["tokens"].item() == pytest.approx(plain.sums["tokens"].item() - 0.5 * entropy, rel=1e-5)
