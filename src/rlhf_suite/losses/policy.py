"""What the policy minimises: the clipped surrogate, and the KL and entropy terms beside it.

Shapes: T tokens laid end to end. The surrogate is summed with `weights` [T] (`reduce.token_weights` of
`actor.loss_agg_mode`); the KL and entropy terms are sums over masked tokens in either mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_suite.config.actor import PolicyConfig
from rlhf_suite.losses.reduce import LossSum, Mean, masked_mean, masked_sum, weighted_sum

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: a ratio beyond it carries no information and would overflow fp32


@dataclass(frozen=True)
class PolicyTokens:
    """What a policy loss reads of a micro-batch, each [T]; only `log_probs` carries a gradient."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor  # 1 for the tokens the model sampled
    weights: Tensor


PolicyLoss = Callable[[PolicyTokens, PolicyConfig], LossSum]


def clip_range(config: PolicyConfig) -> tuple[float, float]:
    """Lower and upper clip of the ratio around 1."""
    if config.eps_clip_low_high is None:
        return config.eps_clip, config.eps_clip
    low, high = config.eps_clip_low_high
    return low, high


def ppo_loss(tokens: PolicyTokens, config: PolicyConfig) -> LossSum:
    """Clipped surrogate of PPO (Schulman et al. 2017), summed with `weights`.

        rho_t = exp(clamp(log pi - log pi_old, -20, 20))
        L_t = -min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t)

    Dual clip (Ye et al. 2020): where A_t < 0, L_t is at most -c A_t, c = `actor.dual_clip` > 1.
    Metrics: `policy_loss`, a mean over units; over masked tokens `ppo_clip_ratio` (share whose clipped term is the
    smaller one) and `ppo_kl` (mean of log pi_old - log pi).
    """
    low, high = clip_range(config)
    chosen = tokens.mask.bool()
    log_ratio = torch.where(chosen, tokens.log_probs - tokens.old_log_probs, 0)  # [T]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = ratio * tokens.advantages
    clipped = ratio.clamp(1 - low, 1 + high) * tokens.advantages
    gain = torch.minimum(plain, clipped)
    if config.dual_clip is not None:
        bound = config.dual_clip * tokens.advantages
        gain = torch.where(tokens.advantages < 0, torch.maximum(gain, bound), gain)
    total = weighted_sum(-gain, tokens.weights)
    metrics = {
        "policy_loss": Mean(total.detach(), tokens.weights.sum()),
        "ppo_clip_ratio": masked_mean((clipped < plain).float(), tokens.mask),
        "ppo_kl": masked_mean(-log_ratio, tokens.mask),
    }
    return LossSum(total, metrics)


POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo": ppo_loss}


def kl_term(kl: Tensor, mask: Tensor, coef: float) -> LossSum:
    """`coef` x sum over masked tokens of the KL estimates `kl` [T] with gradient: pulls the policy to the reference.

    Unit: masked tokens. Metric: `kl_loss`, the mean estimate without the coefficient.
    """
    return LossSum(coef * masked_sum(kl, mask), {"kl_loss": masked_mean(kl, mask)})


def entropy_term(entropy: Tensor, mask: Tensor, coef: float) -> LossSum:
    """-`coef` x sum over masked tokens of `entropy` [T] in nats: minimising it keeps the policy spread out.

    Unit: masked tokens. Metric: `entropy`, the mean itself (positive).
    """
    return LossSum(-coef * masked_sum(entropy, mask), {"entropy": masked_mean(entropy, mask)})
