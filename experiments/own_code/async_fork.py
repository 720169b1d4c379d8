"""Estimators and filters of OpenRLHF's fork for asynchronous agents, as functions outside of the suite:

    python run.py task=ppo algo.advantage.estimator=experiments/own_code/async_fork.py:dpg
    python run.py task=ppo algo.advantage.estimator=experiments/own_code/async_fork.py:no_mean
    python run.py task=ppo algo.advantage.estimator=experiments/own_code/async_fork.py:positive_gamma \
        algo.advantage.gamma=0.999
    python run.py task=ppo algo.advantage.estimator=experiments/own_code/async_fork.py:whitened_by_length
    python run.py task=ppo algo.advantage.estimator=experiments/own_code/async_fork.py:entropy_shaped
    python run.py task=ppo algo.group_filter=experiments/own_code/async_fork.py:outliers
    python run.py task=ppo algo.group_filter=experiments/own_code/async_fork.py:too_long
    python run.py task=ppo algo.prompt_filter=experiments/own_code/async_fork.py:mopps \
        rollout.vllm_generate_batch_size=256

Shapes: B rows, and T tokens that the model wrote, concatenated over all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from rlhf_suite.algo.advantage import (
    Credit,
    CreditInput,
    compute_reward_to_go,
    discounted_sums,
    group_mean,
    group_norm,
    token_rewards,
    whiten,
    whole_rewards,
)
from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.errors import UserError
from rlhf_suite.registry import estimator
from rlhf_suite.rl.filtering import Candidate
from rlhf_suite.rl.samples import ScoredTrajectories

CORRECT = 0.5  # a whole reward above this is that of a right answer
BIN = 1000  # tokens: responses are whitened with those of about their length
ALPHA, KAPPA = (
    0.1,
    2.0,
)  # of the entropy bonus: its weight, and the share of the advantage (1 / KAPPA) that it may reach
REPEATED = 0.2  # share of repeated word trigrams below which no response is an outlier
TARGET, SHARE, DECAY = 0.5, 0.5, 0.9  # of mopps: success to aim at, share that is sampled, weight of the group before


@estimator(needs=("rewards", "groups"))
def dpg(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """Distributional policy gradient towards pi_ref exp(R / beta) (Go et al. 2023), with a baseline from the group.

    w = R / beta - sum_t KL_t is the log of the target over the policy, up to a constant; A = w - log mean exp(w) over
    the group, for all tokens of a response. beta is that of the KL penalty in the reward (estimator k1), so there has
    to be one.

    Raises:
        UserError: there is none.
    """
    if inputs.kl_coef == 0:
        raise UserError("dpg needs the beta of a KL penalty: set algo.kl.init_coef above 0 and algo.kl.use_loss=false")
    rows, written = torch.repeat_interleave(inputs.lengths), inputs.lengths > 0  # [T], [B]
    penalties = torch.zeros_like(inputs.rewards).index_add(0, rows, inputs.kl_penalty)
    weights = (whole_rewards(inputs) - penalties) / inputs.kl_coef  # [B]
    credit = torch.zeros_like(weights)
    for group in inputs.groups[written].unique():
        members = written & (inputs.groups == group)
        credit[members] = weights[members] - weights[members].logsumexp(0) + members.sum().log()
    returns = credit[rows]  # [T]
    return Credit(returns, returns)


@estimator(reads=("no_std_norm",))
def no_mean(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE++ with a baseline, without the baseline: whole rewards, whitened over the rollout."""
    returns = compute_reward_to_go(inputs, whole_rewards(inputs))
    return Credit(whiten(returns, config.no_std_norm), returns)


@estimator(reads=("gamma", "no_std_norm"))
def positive_gamma(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE++ whose discount applies to right answers alone: a long way to one is worth less, and a wrong answer
    costs each of its tokens the same."""
    rewards, rows = token_rewards(inputs), torch.repeat_interleave(inputs.lengths)
    is_right = (whole_rewards(inputs) > CORRECT)[rows]  # [T]
    discounted, whole = (discounted_sums(rewards, inputs.lengths, decay) for decay in (config.gamma, 1.0))
    returns = torch.where(is_right, discounted, whole)
    return Credit(whiten(returns, config.no_std_norm), returns)


@estimator(needs=("rewards", "groups"), reads=("no_std_norm",))
def whitened_by_length(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE++ with the group mean as baseline, whitened among responses of about the same length."""
    rewards = whole_rewards(inputs)
    returns = compute_reward_to_go(inputs, rewards - group_mean(rewards, inputs))
    bins = torch.repeat_interleave(inputs.lengths // BIN, inputs.lengths)  # [T]
    advantages = torch.empty_like(returns)
    for number in bins.unique():
        advantages[bins == number] = whiten(returns[bins == number], config.no_std_norm)
    return Credit(advantages, returns)


@estimator(needs=("rewards", "groups", "entropies"))
def entropy_shaped(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """GRPO with advantages A_t + min(alpha H_t, |A_t| / kappa), H_t the policy's entropy (Cheng et al. 2025): tokens at
    which the policy was uncertain count for more. The bonus never changes a sign."""
    assert inputs.entropies is not None, "entropy_shaped needs entropies"
    credit = group_norm(inputs, config)
    bonus = torch.minimum(ALPHA * inputs.entropies, credit.advantages.abs() / KAPPA)  # [T]
    return Credit(credit.advantages + bonus, credit.returns)


def outliers(group: ScoredTrajectories) -> str | None:
    """Leave out a group with a response that repeats itself far more than the others: its share of repeated word
    trigrams is above the third quartile by more than 1.5 interquartile ranges (Tukey 1977)."""
    shares = np.array([repeated(response.split()) for response in group.responses])
    first, third = np.quantile(shares, [0.25, 0.75])
    limit = max(REPEATED, third + 1.5 * (third - first))
    return "a response repeats itself" if shares.max() > limit else None


def too_long(group: ScoredTrajectories) -> str | None:
    """Leave out a group if the length limit cut most of its responses."""
    cut = sum(t.truncated for t in group.trajectories)
    return "most responses are cut" if cut > len(group.trajectories) / 2 else None


def mopps(candidates: Sequence[Candidate], generator: np.random.Generator) -> list[int]:
    """Return the candidates whose success rate is closest to a half, each by a draw from its posterior: model
    predictive prompt selection (MoPPS, Qu et al. 2025).

    The posterior of a prompt is Beta(1 + right answers, 1 + wrong ones), uniform before it was ever sampled. Each new
    group makes what is known weigh DECAY times as much, since the policy changes.
    """
    draws = [generator.beta(*posterior(candidate.history)) for candidate in candidates]
    count = max(1, math.ceil(SHARE * len(candidates)))
    return sorted(range(len(draws)), key=lambda place: abs(draws[place] - TARGET))[:count]


def posterior(history: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return both parameters of a prompt's Beta distribution, from the scores of its groups."""
    right = wrong = 0.0
    for scores in history:
        passed = sum(score > CORRECT for score in scores)
        right, wrong = DECAY * right + passed, DECAY * wrong + len(scores) - passed
    return 1 + right, 1 + wrong


def repeated(words: Sequence[str]) -> float:
    """Return the share of word trigrams that stand in a text before."""
    trigrams = [*zip(words, words[1:], words[2:], strict=False)]
    return 1 - len({*trigrams}) / len(trigrams) if trigrams else 0.0
