"""Advantage estimators: from one reward per response to an advantage per token.

Shapes: B responses, T token positions. `mask` [B, T] is 1 for tokens the model wrote. Between them may lie gaps (turns
of an environment): no time passes there, so discounting, bootstrapping and the reward at the last token know model
tokens only. A row without model tokens takes part in nothing: no baseline, no statistic, no whitening; its advantages
are 0.

Reward of model token t (beta is inside `kl_penalty`):  r_t = -kl_penalty_t + [t is the row's last model token] R
The baseline is taken from R before that sum, so the KL penalty is not compared between responses.

    name                 R becomes                                  advantage                              whitened
    gae                  R                                          GAE(gamma, lambda)                     yes
    reinforce            R                                          reward-to-go, gamma                    yes
    reinforce_baseline   R - group mean                             reward-to-go, gamma 1                  yes
    rloo                 R - mean of the group's other rows         reward-to-go, gamma 1                  no
    group_norm           (R - group mean) / (group std + 1e-9)      reward-to-go, gamma 1                  no
    dr_grpo              R - group mean                             reward-to-go, gamma 1                  no
    flash_reinforce      R - rollout mean                           reward-to-go, gamma 1                  no
    opo                  R - length-weighted group mean             reward-to-go, gamma 1                  no
    remax                R - R of the prompt's greedy response      reward-to-go, gamma 1                  no
    on_policy_distill    0                                          reward of the token itself             no

All rows of a rollout go in together: whitening and groups are global.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_suite.config.algo import AdvantageConfig
from rlhf_suite.registry import estimator
from rlhf_suite.shapes import same_shape


@dataclass(frozen=True)
class CreditInput:
    """What the estimators read."""

    rewards: Tensor  # [B] R, clipped already
    kl_penalty: Tensor  # [B, T] beta x KL estimate; zeros without a reference or with KL as a loss
    mask: Tensor  # [B, T] of 0 and 1
    groups: Tensor  # [B] int, which prompt a row answers
    values: Tensor | None = None  # [B, T] V(state before token t); gae only
    greedy: Tensor | None = None  # [B] R of the greedy response to the row's prompt; remax only

    def __post_init__(self) -> None:
        same_shape(self.mask, self.kl_penalty, *([] if self.values is None else [self.values]), dims=2)
        same_shape(self.mask.sum(1), self.rewards, self.groups, *([] if self.greedy is None else [self.greedy]))


@dataclass(frozen=True)
class Credit:
    """What the estimators say: zeros outside the mask."""

    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T] target of the critic (gae) or the reward-to-go; never whitened


def assign_credit(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """The advantages and returns of a whole rollout by `algo.advantage.estimator`."""
    credit: Credit = estimator.load(config.estimator)(inputs, config)
    return credit


@estimator(needs=("rewards", "values"), reads=("gamma", "lambd", "no_std_norm"))
def gae(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """Generalised advantage estimation (Schulman et al. 2016); the value after the last model token is 0.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1};  return = A_t + V_t before whitening.
    """
    assert inputs.values is not None, "gae needs values"
    mask = inputs.mask.bool()
    values = torch.where(mask, inputs.values, 0)
    rewards = token_rewards(inputs, inputs.rewards)
    advantages = torch.zeros_like(rewards)
    following_value = torch.zeros_like(rewards[:, 0])  # [B] V and A of the next model token
    following_advantage = torch.zeros_like(following_value)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + config.gamma * following_value - values[:, t]
        advantage = delta + config.gamma * config.lambd * following_advantage
        following_value = torch.where(mask[:, t], values[:, t], following_value)
        following_advantage = torch.where(mask[:, t], advantage, following_advantage)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0)
    return Credit(whiten(advantages, mask, config.no_std_norm), advantages + values)


@estimator(reads=("gamma", "no_std_norm"))
def reinforce(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE++ (Hu 2025): discounted reward-to-go, whitened over the rollout."""
    returns = reward_to_go(token_rewards(inputs, inputs.rewards), inputs.mask, config.gamma)
    return Credit(whiten(returns, inputs.mask, config.no_std_norm), returns)


@estimator(needs=("rewards", "groups"), reads=("no_std_norm",))
def reinforce_baseline(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE++ with the group mean as baseline (Hu 2025)."""
    returns = undiscounted(inputs, inputs.rewards - group_mean(inputs))
    return Credit(whiten(returns, inputs.mask, config.no_std_norm), returns)


@estimator(needs=("rewards", "groups"))
def rloo(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024). A row alone in its group gets 0."""
    members = group_sizes(inputs)  # [B] n
    others = group_sum(inputs.rewards, inputs) - inputs.rewards  # [B] sum over the other rows
    baseline = torch.where(members > 1, others / (members - 1).clamp(min=1), inputs.rewards)
    returns = undiscounted(inputs, inputs.rewards - baseline.to(inputs.rewards.dtype))
    return Credit(returns, returns)


@estimator(needs=("rewards", "groups"))
def group_norm(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """GRPO (Shao et al. 2024): rewards standardised in their group, by the unbiased deviation. A row alone gets 0."""
    centred = inputs.rewards - group_mean(inputs)
    variance = group_sum(centred.square(), inputs) / (group_sizes(inputs) - 1).clamp(min=1)
    deviation = variance.sqrt().to(centred.dtype)
    returns = undiscounted(inputs, centred / (deviation + 1e-9))
    return Credit(returns, returns)


@estimator(needs=("rewards", "groups"))
def dr_grpo(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """Dr. GRPO (Liu et al. 2025): the group mean as baseline, no division by the deviation.

    The paper also divides the loss by a constant instead of lengths: `actor.loss_agg_mode=seq-mean-token-sum-norm`.
    """
    returns = undiscounted(inputs, inputs.rewards - group_mean(inputs))
    return Credit(returns, returns)


@estimator()
def flash_reinforce(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE with the mean reward of the whole rollout as baseline (FlashREINFORCE)."""
    whole = replace(inputs, groups=torch.zeros_like(inputs.groups))
    returns = undiscounted(inputs, inputs.rewards - group_mean(whole))
    return Credit(returns, returns)


@estimator(needs=("rewards", "groups"))
def opo(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """OPO (Hao et al. 2025): the baseline sum(R length) / sum(length) over the group.

    It is the baseline of least variance when the squared gradient norm of a response grows with its length, here its
    model tokens.
    """
    lengths = inputs.mask.sum(1)  # [B]
    weighted = group_sum(inputs.rewards.double() * lengths, inputs) / group_sum(lengths, inputs).clamp(min=1)
    returns = undiscounted(inputs, inputs.rewards - weighted.to(inputs.rewards.dtype))
    return Credit(returns, returns)


@estimator(needs=("rewards", "greedy"))
def remax(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """ReMax (Li et al. 2024): the reward of the greedy response to the same prompt as baseline."""
    assert inputs.greedy is not None, "remax needs greedy responses"
    returns = undiscounted(inputs, inputs.rewards - inputs.greedy)
    return Credit(returns, returns)


@estimator(needs=("teacher",))
def on_policy_distill(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """Nothing of a reward: what there is to learn comes from the teacher, token by token (`algo.distill`)."""
    own = token_rewards(inputs, torch.zeros_like(inputs.rewards))
    return Credit(own, own)


def token_rewards(inputs: CreditInput, rewards: Tensor) -> Tensor:
    """r_t of every token [B, T]: minus the KL penalty, plus `rewards` [B] at the last model token of each row."""
    mask = inputs.mask.bool()
    following = mask.long().flip(1).cumsum(1).flip(1)  # [B, T] model tokens from t on, t included
    is_last = mask & (following == 1)
    return torch.where(mask, -inputs.kl_penalty, 0) + torch.where(is_last, rewards[:, None], 0)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{next model token}, [B, T]; 0 outside the mask."""
    mask = mask.bool()
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])  # [B] G of the next model token
    for t in reversed(range(mask.shape[1])):
        following = torch.where(mask[:, t], rewards[:, t] + gamma * following, following)
        returns[:, t] = torch.where(mask[:, t], following, 0)
    return returns


def undiscounted(inputs: CreditInput, rewards: Tensor) -> Tensor:
    """Reward-to-go with gamma 1, [B, T]: a baseline that compares whole responses leaves no room for discounts."""
    return reward_to_go(token_rewards(inputs, rewards), inputs.mask, 1.0)


def group_sum(values: Tensor, inputs: CreditInput) -> Tensor:
    """Sum of `values` [B] over the rows of each row's group that have model tokens, [B] float64.

    In float64 the mean of equal float32 rewards is that reward exactly, so a group that agrees has advantages of
    exactly 0; in float32 they would be rounding errors, which `group_norm` would blow up to 1.
    """
    takes_part = inputs.mask.bool().any(1)
    names, index = inputs.groups.unique(return_inverse=True)
    totals = torch.zeros(len(names), dtype=torch.float64, device=values.device)
    return totals.index_add(0, index, torch.where(takes_part, values, 0).double())[index]


def group_sizes(inputs: CreditInput) -> Tensor:
    """Number of rows with model tokens in each row's group, [B] float64."""
    return group_sum(torch.ones_like(inputs.rewards), inputs)


def group_mean(inputs: CreditInput) -> Tensor:
    """Mean reward of each row's group, [B]."""
    mean = group_sum(inputs.rewards, inputs) / group_sizes(inputs).clamp(min=1)
    return mean.to(inputs.rewards.dtype)


def whiten(advantages: Tensor, mask: Tensor, no_std_norm: bool) -> Tensor:
    """(A - m) / sqrt(max(v, 1e-8)) over all model tokens of the rollout, v the biased variance; 0 outside the mask.

    `no_std_norm` leaves the division out. [B, T]
    """
    mask = mask.bool()
    chosen = advantages[mask]
    if chosen.numel() == 0:
        return advantages
    centred = torch.where(mask, advantages - chosen.mean(), 0)
    if no_std_norm:
        return centred
    return centred * chosen.var(correction=0).clamp(min=1e-8).rsqrt()


def inside(lengths: Tensor) -> Tensor:
    """Which cells of the padded layout hold a token, [B, L] bool; L is the longest length."""
    longest = int(lengths.max()) if len(lengths) else 0
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def pad(values: Tensor, lengths: Tensor, fill: float = 0) -> Tensor:
    """[T] to [B, L], `fill` behind the end of each sequence."""
    cells = inside(lengths)
    return torch.full(cells.shape, fill, dtype=values.dtype, device=values.device).masked_scatter(cells, values)


def unpad(padded: Tensor, lengths: Tensor) -> Tensor:
    """[B, L] to [T]: what `pad` made, undone."""
    return padded[inside(lengths)]
