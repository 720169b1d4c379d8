"""Each term of the policy's objective is weighted by the distribution that its tokens came from: exact expectations in
float64 over a vocabulary of a few tokens, which an engine samples from q and the trainer rates by p."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_suite.algo.correction import CorrectionInput, correction_weights
from rlhf_suite.config.declarations.algo import AdvantageConfig, KLConfig
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.rl.objectives import PolicyObjective

V, KL_COEF, ENTROPY_COEF = 5, 0.3, 0.2
DRAW = torch.Generator().manual_seed(3)
NOISE = [torch.randn(V, dtype=torch.float64, generator=DRAW) for _ in range(5)]
THETA, REFERENCE, ADVANTAGES = NOISE[:3]
OLD, ENGINE = THETA + 0.3 * NOISE[3], THETA + 0.6 * NOISE[4]
UNBOUNDED = AdvantageConfig(is_correction_level="token", is_correction_mode="clip", is_correction_threshold=[1e9])


def rows(advantage: AdvantageConfig | None, old: torch.Tensor) -> Experience:
    """One response of one token for every token of the vocabulary."""
    p, q, reference = (logits.log_softmax(-1) for logits in (old, ENGINE, REFERENCE))
    ones = torch.ones(V, dtype=torch.float64)
    batch = Experience(torch.arange(V), torch.ones(V, dtype=torch.int64), ones, engine_log_probs=q)
    batch = replace(batch, old_log_probs=p, ref_log_probs=reference, advantages=ADVANTAGES)
    if advantage is None:
        return batch
    given = CorrectionInput(p, q, ones, batch.lengths)
    return replace(batch, correction=correction_weights(given, advantage))


def gradients(actor: ActorConfig, kl: KLConfig, batch: Experience) -> dict[str, torch.Tensor]:
    """The gradient of each term by the logits, in expectation over tokens of the engine, [V]."""
    objective = PolicyObjective(actor, kl, 1.0, 1, KL_COEF)
    theta = THETA.clone().requires_grad_()
    log_probs = theta.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum().expand(V)
    found = dict.fromkeys(("policy", "kl", "entropy"), torch.zeros(V, dtype=torch.float64))
    for token, share in enumerate(ENGINE.softmax(-1)):
        only = replace(batch, mask=torch.nn.functional.one_hot(torch.tensor(token), V).double())
        terms = [objective.surrogate(log_probs, only), *objective.token_terms(log_probs, entropy, only)]
        for name, term in zip(found, terms, strict=True):
            (gradient,) = torch.autograd.grad(term.total, theta, retain_graph=True)
            found[name] = found[name] + share * gradient
    return found


def exact(of: str) -> torch.Tensor:
    """The gradient that the term stands for."""
    theta = THETA.clone().requires_grad_()
    log_probs = theta.log_softmax(-1)
    p = log_probs.exp()
    value = {
        "policy": -(p * ADVANTAGES).sum(),
        "kl": KL_COEF * (p * (log_probs - REFERENCE.log_softmax(-1))).sum(),
        "entropy": ENTROPY_COEF * (p * log_probs).sum(),
    }[of]
    return torch.autograd.grad(value, theta)[0]


def actor(loss: str = "ppo") -> ActorConfig:
    return ActorConfig.of("ppo", policy_loss_type=loss, eps_clip=1e9, entropy_coef=ENTROPY_COEF)


def unbiased(estimator: str) -> KLConfig:
    return KLConfig(use_loss=True, estimator=estimator, unbiased_gradient=True)


@pytest.mark.notices(
    "the KL ignores the correction", "rl/objectives.py", "mask, self.kl_coef, batch.correction)", "mask, self.kl_coef)"
)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_term_is_exact_on_stale_samples(estimator):
    """The policy has moved from p to pi within the update, and the engine sampled from q."""
    found = gradients(actor(), unbiased(estimator), rows(UNBOUNDED, OLD))
    for name, gradient in found.items():
        assert (gradient - exact(name)).norm() <= 1e-12 * exact(name).norm(), name


def test_a_biased_estimate_is_weighted_too():
    """Where the policy has not moved yet, k2 has the gradient of the reverse KL under samples of the policy."""
    found = gradients(actor("reinforce"), KLConfig(use_loss=True, estimator="k2"), rows(UNBOUNDED, THETA))
    for name, gradient in found.items():
        assert (gradient - exact(name)).norm() <= 1e-12 * exact(name).norm(), name


def test_without_a_correction_samples_of_the_policy_itself_are_exact_and_stale_ones_are_not():
    found = gradients(actor(), unbiased("k3"), rows(None, OLD))
    assert (found["kl"] - exact("kl")).norm() > 0.05 * exact("kl").norm()
    assert (found["entropy"] - exact("entropy")).norm() <= 1e-12, "no sampled token enters it"


@pytest.mark.notices(
    "the entropy has the weight of the sampled token",
    "losses/policy.py",
    "torch.where(correction > 0, entropy, 0)",
    "entropy * correction",
)
def test_what_a_correction_drops_has_no_gradient_in_any_term():
    icepop = AdvantageConfig(is_correction_level="token", is_correction_mode="mask", is_correction_threshold=[0.8, 1.3])
    batch = rows(icepop, OLD)
    dropped = batch.correction == 0
    assert 0 < int(dropped.sum()) < V
    found = gradients(actor(), unbiased("k3"), replace(batch, mask=batch.mask, correction=torch.zeros(V).double()))
    assert all(float(gradient.abs().max()) == 0 for gradient in found.values())
    weights = replace(batch, correction=torch.full((V,), 7.0, dtype=torch.float64))
    entropy = gradients(actor(), unbiased("k3"), weights)["entropy"]
    assert (entropy - exact("entropy")).norm() <= 1e-12, "its weight is 1, whatever that of the token is"
