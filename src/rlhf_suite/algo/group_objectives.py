"""Estimators of other objectives than the mean reward of a response, from all samples of a prompt.

Shapes, rewards of turns, episodes of several rows and the KL penalty are those of `algo.advantage`: what stands here is
R', which is laid on the tokens of a row by `compute_reward_to_go`.

    name     objective                                                     R'
    gdpo     several rewards, each of which counts as much as its weight   standardised sum of standardised parts
    maxrl    log-likelihood of a success, to the order n - 1               (R - group mean) / group mean
    pkpo     the largest reward of k samples                               k x mean of (R - largest of k - 1 others)+
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rlhf_suite.algo.advantage import (
    Credit,
    CreditInput,
    compute_reward_to_go,
    count_above,
    episode_sum,
    group_mean,
    roles_of,
    subtract_group_means,
    subtract_means,
    sum_by,
    whole_rewards,
)
from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.errors import UserError
from rlhf_suite.registry import estimator

EPSILON = 1e-9  # added to deviations, as in `group_norm`


@estimator(needs=("rewards", "groups", "parts"), reads=("reward_parts", "reward_part_weights"))
def gdpo(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """GDPO (Liu et al. 2026): every part of the reward is standardised in its group before the parts are added up.

        A_k = (r_k - group mean of r_k) / (group deviation of r_k + 1e-9)
        S = sum_k w_k A_k;    R' = (S - rollout mean of S) / (rollout deviation of S + 1e-9)

    A sum of rewards that is standardised as a whole gives equal advantages to answers that earned the same by other
    parts, and a part of small deviation disappears in it. The paper (arXiv:2601.05242) does not say which deviation is
    meant: here it is the unbiased one, as in `group_norm`. A part that a sample does not have (NaN) adds nothing to it,
    and enters no mean. The reward as a whole, with its penalties and the rewards of turns, is not read.
    """
    weights = config.reward_part_weights or [1.0] * len(config.reward_parts)
    counted = count_above(inputs)
    total = torch.zeros(len(inputs.rewards), dtype=torch.float64)
    for name, weight in zip(config.reward_parts, weights, strict=True):
        total += weight * standardize_by_name(inputs.numbers[name], inputs.groups, counted)
    rewards = standardize_by_name(total, roles_of(inputs), counted)
    returns = compute_reward_to_go(inputs, rewards.to(inputs.rewards.dtype))
    return Credit(returns, returns)


@estimator(needs=("rewards", "groups", "successes"))
def maxrl(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """MaxRL (Tajwar et al. 2026): the group mean as baseline and as divisor, so that rare successes weigh more.

        R' = (R - group mean) / group mean;    0 in a group without a success

    With R of 0 or 1, p the probability of a success and n samples the mean over the group has the expectation
    sum_{k=1}^{n-1} (1 - p)^{k-1} grad p = sum_{k=1}^{n-1} 1/k grad pass@k: the gradient of log p, expanded at p = 1, to
    the order n - 1. (The paper, arXiv:2602.02710, has the order n for the estimate without a baseline; leaving groups
    without a success alone costs one.) Rewards between 0 and 1 count as shares of a success.

    Raises:
        UserError: a reward is below 0, where a mean of 0 no longer means that nothing succeeded.
    """
    rewards = whole_rewards(inputs)
    if bool((rewards[count_above(inputs)] < 0).any()):
        least = float(rewards[count_above(inputs)].min())
        raise UserError(
            f"algo.advantage.estimator=maxrl: a reward is {least:g}, and maxrl divides by the mean of rewards that say "
            "how far a response succeeds, 0 or more. Let the reward be 0 or more, or take another estimator, such as "
            "algo.advantage.estimator=dr_grpo"
        )
    mean = group_mean(rewards, inputs)
    returns = compute_reward_to_go(inputs, torch.where(mean > 0, subtract_group_means(inputs) / mean, 0))
    return Credit(returns, returns)


@estimator(needs=("rewards", "groups"), reads=("pass_k",))
def pkpo(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """PKPO (Walder and Karkhanis 2025): the gradient of the largest reward of k samples, which is pass@k for rewards of
    0 and 1.

        R'_i = k x mean over all sets J of k - 1 other samples of max(R_i - max_J R, 0)

    It is n times equation 33 of the paper (arXiv:2505.15201), since a step is a mean over the n samples of a group: for
    every set of k samples the gradient of each one's log-prob times the largest reward of the set, less what is the
    largest without it. So the mean over the group is an unbiased estimate of the gradient. k is `pass_k`; a group with
    fewer samples gets 0.
    """
    rewards, counted = whole_rewards(inputs), count_above(inputs)
    own = torch.zeros(len(rewards), dtype=torch.float64)
    for group in inputs.groups[counted].unique():
        members = counted & (inputs.groups == group)
        own[members] = torch.from_numpy(best_of_k(rewards[members].double().numpy(), config.pass_k))
    returns = compute_reward_to_go(inputs, episode_sum(own, inputs).to(rewards.dtype))
    return Credit(returns, returns)


def best_of_k(rewards: np.ndarray, k: int) -> np.ndarray:
    """Return k x mean over all sets J of k - 1 others of max(R_i - max_J R, 0), [n] float64, for each of n rewards; 0
    where there are fewer than k.

    With the rewards in ascending order, the share of the sets whose largest member is below the r-th is
    C(r, k - 1) / C(n - 1, k - 1), so from one reward to the next the mean grows by their difference times that share.
    """
    count = len(rewards)
    if count < k:
        return np.zeros(count)
    order = np.argsort(rewards, kind="stable")
    grown, sets = [0.0], math.comb(count - 1, k - 1)
    for rank, (below, above) in enumerate(pairwise(rewards[order].tolist()), start=1):
        grown.append(grown[-1] + k * (above - below) * math.comb(rank, k - 1) / sets)
    result = np.zeros(count)
    result[order] = grown
    return result


def standardize_by_name(values: Tensor, names: Tensor, counted: Tensor) -> Tensor:
    """Return (x - m) / (s + 1e-9) for values [B], [B] float64: mean and unbiased deviation of the counted rows [B] of
    the same name [B]. 0 for NaN, which is in no mean, and where all rows of a name agree but for rounding."""
    is_known = ~values.isnan()
    exact, counted = torch.where(is_known, values.double(), 0), counted & is_known
    centred = torch.where(is_known, subtract_means(exact, names, counted, exact.abs()), 0)
    variance = sum_by(names, centred.square() * counted) / (sum_by(names, counted) - 1).clamp(min=1)
    return centred / (variance.sqrt() + EPSILON)
