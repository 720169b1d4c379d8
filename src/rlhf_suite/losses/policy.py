"""What the policy minimises: the policy losses by name, and the KL and entropy terms beside them.

Shapes: T tokens laid end to end, B sequences. A policy loss gives a number per token; `policy_term` sums them with the
weights [T] of `actor.loss_agg_mode` (`reduce.token_weights`). The KL and entropy terms are sums over masked tokens
whatever the mode.

    name        loss of token t, rho_t = pi / pi_old, sg = stop-gradient                                  paper
    ppo         -min(rho_t A_t, clip(rho_t) A_t)                                              arXiv:1707.06347
    gspo        the same with s_t = sg(geometric mean of the sequence's rho) pi / sg(pi)      arXiv:2507.18071
    cispo       -sg(clip(rho_t)) A_t log pi                                                   arXiv:2506.13585
    sapo        -(4 / tau) sigmoid(tau (rho_t - 1)) A_t, tau by the sign of A_t               arXiv:2511.20347
    dppo_tv     -M_t sg(min(rho_t, c)) A_t log pi, M_t = 0 where A_t pushes pi further away    arXiv:2602.04879
                from pi_old than |pi - pi_old| allows
    dppo_kl     the same, where the KL of the sampled token against all others does not allow it
    clip_cov    as ppo, and 0 at tokens that are chosen by their covariance (`covariance`)    arXiv:2505.22617
    kl_cov      -rho_t A_t, and + beta |log rho_t| at tokens that are chosen by it
    importance_sampling  -rho_t A_t: no clip
    dro         -A_t log pi + beta / 2 (log rho_t)^2                                          arXiv:2405.19107
    reinforce   -A_t log pi: no ratio
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.losses.metrics import Mean
from rlhf_suite.losses.reduce import (
    LossSum,
    log1mexp,
    masked_mean,
    masked_sum,
    sequence_sums,
    tokens_per_sequence,
    weighted_sum,
)
from rlhf_suite.registry import policy_loss
from rlhf_suite.shapes import is_like, same_shape

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: a ratio beyond it carries no information and would overflow fp32


@dataclass(frozen=True)
class PolicyTokens:
    """What a policy loss reads of a micro-batch of T tokens; only `log_probs` carries a gradient."""

    log_probs: Tensor  # [T] nats, of each token by the policy as it is now (pi)
    old_log_probs: Tensor  # [T] nats, of each token by the policy before the update (pi_old)
    advantages: Tensor  # [T] how much better than the baseline each token is (A)
    mask: Tensor  # [T] 1 for the tokens that the model sampled, else 0
    segments: Tensor  # [T] int, the number of the sequence that each token belongs to
    num_sequences: int  # B, sequences without a masked token included
    chosen: Tensor | None = None  # [T] bool, tokens that their covariances single out; for losses that need them

    def __post_init__(self) -> None:
        per_token = (self.log_probs, self.old_log_probs, self.advantages, self.mask, self.segments)
        same_shape(*per_token, *(() if self.chosen is None else (self.chosen,)))

    @property
    def log_ratio(self) -> Tensor:
        """log pi - log pi_old, [T]; 0 outside the mask."""
        return torch.where(self.mask.bool(), self.log_probs - self.old_log_probs, 0)


@dataclass(frozen=True)
class TokenLosses:
    """What a policy loss says, each [T]; any number outside the mask."""

    losses: Tensor
    clipped: Tensor | None = None  # bool: where the clip has a hand in it; None for losses without one
    above: Tensor | None = None  # bool: where the ratio is above 1; None with `clipped`


def policy_term(
    tokens: PolicyTokens, config: ActorConfig, weights: Tensor, num_units: Tensor, correction: Tensor | None = None
) -> LossSum:
    """Return the loss of `actor.policy_loss_type`, summed with `weights` [T].

    `correction` [T] multiplies each token's loss (`algo.correction`); the units stay those of all masked tokens.
    Metrics: `policy_loss`, a mean over `num_units` units; over masked tokens `ppo_kl` (mean of log pi_old - log pi)
    and, of losses that clip, `ppo_clip_ratio` (share of the tokens where the clip has a hand in it) with its parts
    `ppo_clip_ratio_low` and `ppo_clip_ratio_high`, by the side on which the ratio left the range.
    """
    same_shape(tokens.mask, weights)
    result = policy_loss.load(config.policy_loss_type)(tokens, config)
    if not isinstance(result, TokenLosses) or not is_like(result.losses, weights):
        wanted = f"TokenLosses with the loss of each of the {len(weights)} tokens"
        raise policy_loss.wrong_result(config.policy_loss_type, result, wanted)
    losses = result.losses if correction is None else result.losses * correction
    total = weighted_sum(losses, weights)
    metrics = {
        "policy_loss": Mean(total.detach(), num_units),
        "ppo_kl": masked_mean(-tokens.log_ratio, tokens.mask),
    }
    if result.clipped is not None and result.above is not None:
        metrics["ppo_clip_ratio"] = masked_mean(result.clipped.float(), tokens.mask)
        metrics["ppo_clip_ratio_low"] = masked_mean((result.clipped & ~result.above).float(), tokens.mask)
        metrics["ppo_clip_ratio_high"] = masked_mean((result.clipped & result.above).float(), tokens.mask)
    return LossSum(total, metrics)


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """Lower and upper clip of the ratio around 1."""
    if config.eps_clip_low_high is None:
        return config.eps_clip, config.eps_clip
    low, high = config.eps_clip_low_high
    return low, high


@policy_loss(reads=("eps_clip", "eps_clip_low_high", "dual_clip"))
def ppo(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """Clipped surrogate of PPO (Schulman et al. 2017).

        rho_t = exp(clamp(log pi - log pi_old, -20, 20))
        L_t = -min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t)

    Dual clip (Ye et al. 2020): where A_t < 0, L_t is at most -c A_t, c = `actor.dual_clip` > 1.
    """
    return clipped_surrogate(compute_ratio(tokens.log_ratio), tokens.advantages, config)


@policy_loss(needs=("sequences",), reads=("eps_clip", "eps_clip_low_high", "dual_clip"))
def gspo(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """PPO's surrogate on the ratio of the whole sequence y, its geometric mean over tokens (Zheng et al. 2025).

        s = exp(clamp(1/|y| sum_t (log pi - log pi_old), -20, 20))

    In the form for advantages that differ between tokens (GSPO-token, section 4.3): token t has the value s, and the
    gradient of its own log-prob alone. Where all tokens share one advantage, the gradient is that of plain GSPO.
    """
    log_ratio = tokens.log_ratio.detach()
    counts = tokens_per_sequence(tokens.mask, tokens.segments, tokens.num_sequences).to(log_ratio.dtype)
    means = sequence_sums(log_ratio, tokens.segments, tokens.num_sequences) / counts.clamp(min=1)  # [B]
    own = tokens.log_probs - tokens.log_probs.detach()  # 0, with gradient
    return clipped_surrogate(compute_ratio(means[tokens.segments] + own), tokens.advantages, config)


@policy_loss(reads=("eps_clip", "eps_clip_low_high"))
def cispo(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """Clipped importance weights (MiniMax-M1 2025): every token keeps its gradient, none weighs more than the clip.

    L_t = -sg(clip(rho_t, 1 - eps_low, 1 + eps_high)) A_t log pi. The paper sets no lower bound (eps_low >= 1).
    """
    low, high = clip_range(config)
    ratio = compute_ratio(tokens.log_ratio.detach())
    weight = ratio.clamp(1 - low, 1 + high)
    clipped = (weight != ratio) & (tokens.advantages != 0)
    return TokenLosses(-weight * tokens.advantages * tokens.log_probs, clipped, ratio > 1)


@policy_loss(reads=("sapo_tau_pos", "sapo_tau_neg"))
def sapo(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """A soft gate in place of the clip (Gao et al. 2025): L_t = -(4 / tau) sigmoid(tau (rho_t - 1)) A_t.

    tau = `actor.sapo_tau_pos` where A_t > 0, else `actor.sapo_tau_neg`. At rho = 1 the gradient is that of PPO,
    whatever tau; it fades as the ratio leaves 1, faster for a larger tau.
    """
    ratio = compute_ratio(tokens.log_ratio)
    tau = torch.where(tokens.advantages > 0, config.sapo_tau_pos, config.sapo_tau_neg).to(ratio.dtype)
    return TokenLosses(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * tokens.advantages)


@policy_loss(reads=("dppo_tv_max", "dppo_ratio_max"))
def dppo_tv(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """DPPO with total variation (Qi et al. 2026): a token is dropped whose probability, not ratio, has moved too far.

        L_t = -M_t sg(min(rho_t, c)) A_t log pi,    D_t = |pi - pi_old| of the sampled token
        M_t = 0 where D_t > delta and A_t pushes pi further away: A_t > 0 and rho_t > 1, or A_t < 0 and rho_t < 1

    D_t is the total variation between the two policies if every other token counts as one ("Binary-TV"). delta is
    `actor.dppo_tv_max`. The bound c, `actor.dppo_ratio_max`, is that of the authors' code: a likelier token of a
    probability of 1e-6 could have a ratio of 1e5 within any delta. The paper measures from the policy that sampled,
    engine and all; here pi_old is the trainer's, and what the engine differs from it is the correction's.
    """
    now, before = tokens.log_probs.detach().exp(), tokens.old_log_probs.exp()
    return drop_far_tokens(tokens, (now - before).abs() > config.dppo_tv_max, config)


@policy_loss(reads=("dppo_kl_max", "dppo_ratio_max"))
def dppo_kl(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """DPPO with a KL divergence (Qi et al. 2026): `dppo_tv` with another measure of how far a probability has moved.

        D_t = q log(q / p) + (1 - q) log((1 - q) / (1 - p)),    p = pi, q = pi_old of the sampled token

    It is the KL between the two policies if every other token counts as one ("Binary-KL"); delta is
    `actor.dppo_kl_max`.
    """
    now, before = tokens.log_probs.detach(), tokens.old_log_probs
    sampled, others = before.exp() * (before - now), -torch.expm1(before) * (log1mexp(before) - log1mexp(now))
    return drop_far_tokens(tokens, sampled + others > config.dppo_kl_max, config)


@policy_loss(
    needs=("covariance_band",),
    reads=("eps_clip", "eps_clip_low_high", "dual_clip", "clip_cov_ratio", "clip_cov_range"),
)
def clip_cov(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """Clip-Cov (Cui et al. 2025): PPO's surrogate, without a share of the tokens that lower the entropy most.

    L_t = 0 at `actor.clip_cov_ratio` of the rollout's tokens, drawn among those whose covariance is within
    `actor.clip_cov_range`, and else that of `ppo`. The authors' runs clip ratios at 0 and 2, so that little is clipped.
    """
    assert tokens.chosen is not None, "clip_cov needs the tokens that its covariances choose"
    surrogate = clipped_surrogate(compute_ratio(tokens.log_ratio), tokens.advantages, config)
    return replace(surrogate, losses=torch.where(tokens.chosen, 0, surrogate.losses))


@policy_loss(needs=("largest_covariances",), reads=("kl_cov_ratio", "kl_cov_coef"))
def kl_cov(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """KL-Cov (Cui et al. 2025): no clip, and a pull back to the old policy at the tokens that lower the entropy most.

        L_t = -rho_t A_t + beta |log pi - log pi_old| at `actor.kl_cov_ratio` of the rollout's tokens, those of the
        largest covariance, and else -rho_t A_t;    beta = `actor.kl_cov_coef`

    The paper writes a KL(pi_old, pi); what it is estimated by, the absolute log-ratio, is that of the authors' code:
    the log-ratio itself would have a gradient of mean zero.
    """
    assert tokens.chosen is not None, "kl_cov needs the tokens that its covariances choose"
    losses = -compute_ratio(tokens.log_ratio) * tokens.advantages
    pulled = losses + config.kl_cov_coef * tokens.log_ratio.abs()
    return TokenLosses(torch.where(tokens.chosen, pulled, losses))


@policy_loss()
def importance_sampling(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """The policy gradient by importance sampling, without a clip: L_t = -rho_t A_t."""
    return TokenLosses(-compute_ratio(tokens.log_ratio) * tokens.advantages)


@policy_loss(reads=("dro_beta",))
def dro(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """Direct reward optimisation (Richemond et al. 2024): no clip, but a quadratic penalty on the log-ratio.

    L_t = -A_t log pi + beta / 2 (log pi - log pi_old)^2;    beta = `actor.dro_beta`
    """
    return TokenLosses(-tokens.advantages * tokens.log_probs + config.dro_beta / 2 * tokens.log_ratio.square())


@policy_loss()
def reinforce(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """The plain policy gradient (Williams 1992): L_t = -A_t log pi. Exact on policy; old log-probs do not matter."""
    return TokenLosses(-tokens.advantages * tokens.log_probs)


def drop_far_tokens(tokens: PolicyTokens, is_far: Tensor, config: ActorConfig) -> TokenLosses:
    """-sg(min(rho, c)) A log pi, and 0 where pi is too far from pi_old, [T] bool, and A pushes it further away."""
    ratio = compute_ratio(tokens.log_ratio).detach()
    dropped = is_far & (tokens.advantages * (ratio - 1) > 0)
    losses = -ratio.clamp(max=config.dppo_ratio_max) * tokens.advantages * tokens.log_probs
    return TokenLosses(torch.where(dropped, 0, losses), dropped, ratio > 1)


def compute_ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio within +-20; beyond it the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: ActorConfig) -> TokenLosses:
    """-min(rho A, clip(rho) A), bounded by the dual clip. All [T]."""
    low, high = clip_range(config)
    plain = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    gain = torch.minimum(plain, clipped)
    if config.dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, config.dual_clip * advantages), gain)
    return TokenLosses(-gain, clipped < plain, ratio.detach() > 1)


def kl_term(kl: Tensor, mask: Tensor, coef: float, correction: Tensor | None = None) -> LossSum:
    """`coef` x sum over masked tokens of the KL estimates `kl` [T] with gradient: pulls the policy to the reference.

    The estimate of a token is an expectation over what the policy samples, so one that the engine sampled from q is
    multiplied by its `correction` [T], as its policy loss is. Unit: masked tokens. Metric: `kl_loss`, the mean estimate
    without coefficient and correction.
    """
    same_shape(kl, mask)
    corrected = kl if correction is None else torch.where(mask.bool(), kl, 0) * correction
    return LossSum(coef * masked_sum(corrected, mask), {"kl_loss": masked_mean(kl, mask)})


def entropy_term(entropy: Tensor, mask: Tensor, coef: float, correction: Tensor | None = None) -> LossSum:
    """-`coef` x sum over masked tokens of `entropy` [T] in nats: minimising it keeps the policy spread out.

    An entropy is computed from the whole distribution of the policy, not from the token that was sampled, so nothing is
    to be corrected: its weight is 1, whatever `correction` [T] is, and 0 only at tokens that the correction drops.
    Unit: masked tokens. Metric: `entropy`, the mean itself (positive).
    """
    same_shape(entropy, mask)
    kept = entropy if correction is None else torch.where(correction > 0, entropy, 0)
    return LossSum(-coef * masked_sum(kept, mask), {"entropy": masked_mean(entropy, mask)})
