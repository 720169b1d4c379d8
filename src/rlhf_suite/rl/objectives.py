"""What an optimiser step of the policy and of the critic minimises."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhf_suite.algo.kl import estimate_kl, estimate_unbiased_kl
from rlhf_suite.config.declarations.algo import KLConfig
from rlhf_suite.config.declarations.models import ActorConfig, CriticConfig
from rlhf_suite.data.batch import require_column
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.losses.policy import PolicyTokens, entropy_term, kl_term, policy_term
from rlhf_suite.losses.reduce import LossSum, masked_mean, num_units, token_weights
from rlhf_suite.losses.tokens import value_loss, value_range
from rlhf_suite.models.forward import token_log_probs, token_values
from rlhf_suite.registry import aggregation
from rlhf_suite.train.task import Forward, StepLoss


@dataclass
class PolicyObjective:
    """Minimise policy loss + beta * KL (use_loss) - entropy_coef * entropy.

    The policy loss is a mean by actor.loss_agg_mode; KL and entropy are means over tokens. Where `correction` weighs
    tokens by p / q, policy loss and KL have that weight, and the entropy drops what the correction drops.
    """

    actor: ActorConfig
    kl: KLConfig
    temperature: float
    horizon: int  # the most tokens a response may have
    kl_coef: float = 0.0
    adapted_entropy_coef: float | None = None  # in place of actor.entropy_coef, where it is steered

    def units(self, batch: Experience) -> dict[str, torch.Tensor]:
        mode, whole = self.actor.loss_agg_mode, batch.episode_tokens
        units = num_units(batch.mask, batch.segments, len(batch), mode, whole)
        return {"tokens": batch.mask.sum(), "policy_units": units}

    def loss(self, model: Forward, batch: Experience) -> StepLoss:
        mask = batch.mask
        wants_entropy = self.actor.entropy_coef is not None
        output = token_log_probs(model, batch, temperature=self.temperature, entropy=wants_entropy, masked=True)
        surrogate = self.surrogate(output.log_probs, batch)
        terms = self.token_terms(output.log_probs, output.entropy, batch)
        unit = "tokens" if aggregation.needs(self.actor.loss_agg_mode, "tokens") else "policy_units"
        sums = {"tokens": torch.stack([torch.zeros_like(surrogate.total), *(term.total for term in terms)]).sum()}
        sums[unit] = sums.get(unit, 0.0) + surrogate.total
        metrics = {name: metric for part in (surrogate, *terms) for name, metric in part.metrics.items()}
        if batch.old_log_probs is None:
            gap = (require_column(batch.engine_log_probs, "engine_log_probs") - output.log_probs.detach()).abs()
            metrics["engine_gap"] = masked_mean(gap, mask)
        if output.rerouted is not None:
            known = (require_column(batch.routes, "routes")[:, 0, 0] >= 0).float()  # [T]
            metrics["rerouted"] = masked_mean(output.rerouted, known)
        return StepLoss(sums, metrics)

    def surrogate(self, log_probs: torch.Tensor, batch: Experience) -> LossSum:
        """Return the policy loss. Without old log-probs the policy has not moved since the rollout."""
        mask, segments, rows, mode = batch.mask, batch.segments, len(batch), self.actor.loss_agg_mode
        tokens = PolicyTokens(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs,
            advantages=require_column(batch.advantages, "advantages"),
            mask=mask,
            segments=segments,
            num_sequences=rows,
            chosen=batch.chosen,
        )
        weights = token_weights(mask, segments, rows, mode, self.horizon, batch.episode_tokens)
        units = num_units(mask, segments, rows, mode, batch.episode_tokens)
        return policy_term(tokens, self.actor, weights, units, batch.correction)

    def token_terms(self, log_probs: torch.Tensor, entropy: torch.Tensor | None, batch: Experience) -> list[LossSum]:
        """Return the terms that are means over tokens, whatever the surrogate is."""
        mask, terms = batch.mask, []
        if self.kl.use_loss:
            terms.append(kl_term(self.kl_estimates(log_probs, batch), mask, self.kl_coef, batch.correction))
        coef = self.actor.entropy_coef if self.adapted_entropy_coef is None else self.adapted_entropy_coef
        if entropy is not None and coef is not None:
            terms.append(entropy_term(entropy, mask, coef, batch.correction))
        return terms

    def kl_estimates(self, log_probs: torch.Tensor, batch: Experience) -> torch.Tensor:
        """Return the KL estimate of every token, [T], with gradient."""
        reference = require_column(batch.ref_log_probs, "ref_log_probs")
        if not self.kl.unbiased_gradient:
            return estimate_kl(log_probs, reference, self.kl.estimator)
        old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        return estimate_unbiased_kl(log_probs, reference, old, self.kl.estimator)


@dataclass
class ValueObjective:
    """Minimise the clipped value loss, a mean over tokens."""

    critic: CriticConfig

    def units(self, batch: Experience) -> dict[str, torch.Tensor]:
        return {"tokens": batch.mask.sum()}

    def loss(self, model: Forward, batch: Experience) -> StepLoss:
        values, old = token_values(model, batch), require_column(batch.values, "values")
        clip = value_range(self.critic)
        result = value_loss(values, old, require_column(batch.returns, "returns"), batch.mask, clip)
        return StepLoss.of("tokens", result)
