"""Advantage estimators: from rewards of responses and turns to an advantage per token.

Shapes: B rows, T tokens that the model wrote, those of all rows laid end to end; `lengths` [B] says how many each row
has. Tokens of an environment are left out before: no time passes there, so discounting, bootstrapping and the reward at
the last token know model tokens only. A row without model tokens takes part in nothing: no baseline, no statistic.

Reward of token t (beta is inside `kl_penalty`):  r_t = -kl_penalty_t + turn_t + [t is the row's last token] R
The estimators with a baseline take it from the whole reward, R and all turns, before that sum. So the KL penalty is not
compared between responses, and what is left stands at the last token (R').

    name                 R'                                         advantage                              whitened
    gae                  R, and turns where they stand              GAE(gamma, lambda)                     yes
    reinforce            R, and turns where they stand              reward-to-go, gamma                    yes
    reinforce_baseline   R - group mean                             reward-to-go, gamma 1                  yes
    rloo                 R - mean of the group's other episodes     reward-to-go, gamma 1                  no
    group_norm           (R - group mean) / (group std + 1e-9) *    reward-to-go, gamma 1                  no
    dr_grpo              R - group mean                             reward-to-go, gamma 1                  no
    flash_reinforce      R - rollout mean                           reward-to-go, gamma 1                  no
    opo                  R - length-weighted group mean             reward-to-go, gamma 1                  no
    remax                R - R of the prompt's greedy response      reward-to-go, gamma 1                  no
    on_policy_distill    0                                          reward of the token itself             no

`algo.group_objectives` has more: gdpo, maxrl and pkpo.

* and reinforce_baseline: 0 in a group whose rewards agree but for rounding (`subtract_group_means`).

All rows of a rollout go in together: whitening and groups are global, but of each role by itself. Several rows may
belong to one episode; they carry its reward, and baselines count it once. The KL penalty of a token counts for earlier
tokens of its own row. gae and reinforce refuse such episodes: the order of the tokens of two rows is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rlhf_suite.algo.scores import ROUNDING
from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.errors import UserError
from rlhf_suite.registry import estimator
from rlhf_suite.shapes import is_like, same_shape

WITH_TIME = estimator.that_read("gamma")


class Numbers(dict[str, Tensor]):
    """Numbers that rewards and agents gave to samples, each by its name, [B]; NaN in the rows that have none."""

    def __missing__(self, name: str) -> Tensor:
        fix = f'declare it with @estimator(needs=("number:{name}",)) (docs/own_code.md)'
        raise UserError(
            f"the estimator reads the number {name!r} of samples, which it does not say that it needs: {fix}"
        )


@dataclass(frozen=True)
class CreditInput:
    """What an estimator reads: B rows (ledgers) of a rollout, and the T tokens that the model wrote in them, laid end
    to end. All tensors are on the CPU, and float32 unless they say int."""

    rewards: Tensor  # [B] R: the reward of the row's episode besides its turns, after shaping
    kl_penalty: Tensor  # [T] beta x the estimate of the KL in nats; zeros without a reference or with KL as a loss
    lengths: Tensor  # [B] int, the number of tokens that the model wrote in each row; their sum is T
    groups: Tensor  # [B] int, which rows are compared: those of a prompt, and of one role in it
    values: Tensor | None = None  # [T] the critic's value of the state before each token; only for "values"
    greedy: Tensor | None = None  # [B] the whole reward of the greedy response to the row's prompt; only for "greedy"
    turn_rewards: Tensor | None = None  # [T] rewards besides R, each at the last token of its turn; None: all 0
    episodes: Tensor | None = None  # [B] int, the number of the episode that each row belongs to; None: each is one
    roles: Tensor | None = None  # [B] int, the role that each row's episode was played in; None: there are no roles
    entropies: Tensor | None = None  # [T] nats, of the policy where each token was chosen; only for "entropies"
    totals: Tensor | None = None  # [B] the whole reward of each row's episode; None: R and its turns, added up
    kl_coef: float = 0.0  # beta of `kl_penalty` in this step; 0 where the KL is not a penalty
    numbers: Numbers = field(default_factory=Numbers)  # [B] for each name in `needs=("number:<name>",)`

    def __post_init__(self) -> None:
        per_token = (self.values, self.turn_rewards, self.entropies)
        same_shape(self.kl_penalty, *(column for column in per_token if column is not None))
        per_row = (column for column in (self.greedy, self.episodes, self.roles, self.totals) if column is not None)
        same_shape(self.rewards, self.lengths, self.groups, *per_row, *self.numbers.values())
        assert int(self.lengths.sum()) == len(self.kl_penalty), "lengths count the tokens"


@dataclass(frozen=True)
class Credit:
    """What an estimator returns: two numbers for each of the T tokens that the model wrote, in units of the reward."""

    advantages: Tensor  # [T] how much better than the baseline each token is; whitened where the estimator whitens
    returns: Tensor  # [T] the value that the critic is trained towards (gae), or the reward-to-go; never whitened


def assign_credit(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """Return the advantages and returns of a whole rollout by `algo.advantage.estimator`.

    Raises:
        UserError: an estimator of the user's own returns other shapes, or an estimator with a discount gets episodes
        of several rows.
    """
    if config.estimator in WITH_TIME and has_forks(inputs):
        raise UserError(
            f"algo.advantage.estimator={config.estimator}: the history of an episode was rewritten, so that it has "
            "several ledgers, and which token of two ledgers came first is not known. Take an estimator that compares "
            "whole episodes, such as algo.advantage.estimator=group_norm or rloo"
        )
    credit: Credit = estimator.load(config.estimator)(inputs, config)
    numbers = (credit.advantages, credit.returns) if isinstance(credit, Credit) else (None,)
    if not all(is_like(values, inputs.kl_penalty) for values in numbers):
        wanted = f"Credit(advantages, returns), each one number for each of the {len(inputs.kl_penalty)} tokens"
        raise estimator.wrong_result(config.estimator, credit, wanted)
    return credit


@estimator(needs=("rewards", "values"), reads=("gamma", "lambd", "no_std_norm"))
def gae(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """Generalised advantage estimation (Schulman et al. 2016); the value after the last model token is 0.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1};  return = A_t + V_t before whitening.
    """
    assert inputs.values is not None, "gae needs values"
    deltas = token_rewards(inputs) + config.gamma * shift_left(inputs.values, inputs.lengths) - inputs.values
    advantages = discounted_sums(deltas, inputs.lengths, config.gamma * config.lambd)
    return Credit(whiten_roles(advantages, inputs, config), advantages + inputs.values)


@estimator(reads=("gamma", "no_std_norm"))
def reinforce(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE++ (Hu 2025): discounted reward-to-go, whitened over the rollout."""
    returns = discounted_sums(token_rewards(inputs), inputs.lengths, config.gamma)
    return Credit(whiten_roles(returns, inputs, config), returns)


@estimator(needs=("rewards", "groups"), reads=("no_std_norm",))
def reinforce_baseline(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE++ with the group mean as baseline (Hu 2025)."""
    returns = compute_reward_to_go(inputs, subtract_group_means(inputs))
    return Credit(whiten_roles(returns, inputs, config), returns)


@estimator(needs=("rewards", "groups"))
def rloo(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024). A single episode in a group gets 0."""
    rewards = whole_rewards(inputs)
    members = group_sizes(inputs)  # [B] n
    others = group_sum(rewards, inputs) - rewards  # [B] sum over the other episodes
    baseline = torch.where(members > 1, others / (members - 1).clamp(min=1), rewards)
    returns = compute_reward_to_go(inputs, rewards - baseline.to(rewards.dtype))
    return Credit(returns, returns)


@estimator(needs=("rewards", "groups"))
def group_norm(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """GRPO (Shao et al. 2024): rewards standardised in their group, by the unbiased deviation. A single one gets 0."""
    centred = subtract_group_means(inputs)
    variance = group_sum(centred.square(), inputs) / (group_sizes(inputs) - 1).clamp(min=1)
    deviation = variance.sqrt().to(centred.dtype)
    returns = compute_reward_to_go(inputs, centred / (deviation + 1e-9))
    return Credit(returns, returns)


@estimator(needs=("rewards", "groups"))
def dr_grpo(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """Dr. GRPO (Liu et al. 2025): the group mean as baseline, no division by the deviation.

    The paper also divides the loss by a constant instead of lengths: `actor.loss_agg_mode=seq-mean-token-sum-norm`.
    """
    rewards = whole_rewards(inputs)
    returns = compute_reward_to_go(inputs, rewards - group_mean(rewards, inputs))
    return Credit(returns, returns)


@estimator()
def flash_reinforce(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """REINFORCE with the mean reward of the whole rollout as baseline (FlashREINFORCE); of each role in it."""
    rewards = whole_rewards(inputs)
    whole = replace(inputs, groups=roles_of(inputs))
    returns = compute_reward_to_go(inputs, rewards - group_mean(rewards, whole))
    return Credit(returns, returns)


@estimator(needs=("rewards", "groups"))
def opo(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """OPO (Hao et al. 2025): the baseline sum(R length) / sum(length) over the group.

    It is the baseline of least variance when the squared gradient norm of a response grows with its length, here its
    model tokens.
    """
    rewards = whole_rewards(inputs)
    lengths = episode_sum(inputs.lengths, inputs)  # [B]
    weighted = group_sum(rewards.double() * lengths, inputs) / group_sum(lengths, inputs).clamp(min=1)
    returns = compute_reward_to_go(inputs, rewards - weighted.to(rewards.dtype))
    return Credit(returns, returns)


@estimator(needs=("rewards", "greedy"))
def remax(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """ReMax (Li et al. 2024): the reward of the greedy response to the same prompt as baseline."""
    assert inputs.greedy is not None, "remax needs greedy responses"
    returns = compute_reward_to_go(inputs, whole_rewards(inputs) - inputs.greedy)
    return Credit(returns, returns)


@estimator(needs=("teacher",))
def on_policy_distill(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """On-policy distillation: rewards are not used; only the teacher rates each token (`algo.distill`)."""
    own = with_outcomes(inputs, torch.zeros_like(inputs.rewards))
    return Credit(own, own)


# Rewards of tokens and of episodes


def token_rewards(inputs: CreditInput) -> Tensor:
    """Return r_t, [T]: minus the KL penalty, plus what stands at the token itself of turns and of R."""
    rewards = with_outcomes(inputs, inputs.rewards)
    return rewards if inputs.turn_rewards is None else rewards + inputs.turn_rewards


def with_outcomes(inputs: CreditInput, outcomes: Tensor) -> Tensor:
    """Return minus the KL penalty, plus `outcomes` [B] at the last token of each row, [T]."""
    rewards = 0 - inputs.kl_penalty
    rewards[last_tokens(inputs.lengths)] += outcomes[inputs.lengths > 0]
    return rewards


def whole_rewards(inputs: CreditInput) -> Tensor:
    """Return the whole reward of each row's episode, [B]: R and all its turn rewards."""
    if inputs.totals is not None:
        return inputs.totals
    if inputs.turn_rewards is None:
        return inputs.rewards
    return (inputs.rewards.double() + episode_sum(turn_sums(inputs.turn_rewards, inputs), inputs)).to(
        inputs.rewards.dtype
    )


def turn_sums(turns: Tensor, inputs: CreditInput) -> Tensor:
    """Return the sum of `turns` [T] over the tokens of each row, [B] float64."""
    rows = torch.repeat_interleave(inputs.lengths)  # [T]
    return torch.zeros(len(inputs.rewards), dtype=torch.float64).index_add(0, rows, turns.double())


def subtract_group_means(inputs: CreditInput) -> Tensor:
    """Return the whole reward of each row less the mean of its group, [B]; 0 in a group whose rewards agree.

    They agree where they differ by no more than `ROUNDING` of what they are sums of: episodes that earn the same by
    other turns differ by the rounding of float32, which a division by their deviation would blow up to 1.
    """
    rewards = whole_rewards(inputs)
    size = rewards.abs().double()
    if inputs.turn_rewards is not None:
        size = size + episode_sum(turn_sums(inputs.turn_rewards.abs(), inputs), inputs)
    return subtract_means(rewards, inputs.groups, count_above(inputs), size)


def subtract_means(values: Tensor, names: Tensor, counted: Tensor, size: Tensor) -> Tensor:
    """Return `values` [B] less the mean of the counted rows [B] of the same name [B], [B]; 0 where all of these agree
    but for the rounding of what they are sums of, whose absolute values add up to `size` [B]."""
    mean = sum_by(names, torch.where(counted, values, 0)) / sum_by(names, counted).clamp(min=1)
    centred = values - mean.to(values.dtype)
    known, index = names.unique(return_inverse=True)
    spread, largest = (
        torch.zeros(len(known), dtype=torch.float64).scatter_reduce(0, index, part.double(), "amax")[index]
        for part in (torch.where(counted, centred.abs(), 0), torch.where(counted, size, 0))
    )
    return torch.where(spread <= ROUNDING * largest, 0, centred)


def compute_reward_to_go(inputs: CreditInput, rewards: Tensor) -> Tensor:
    """Return the reward-to-go with gamma 1 of `rewards` [B] at the last tokens, less the KL penalty, [T]: a baseline
    that compares whole responses leaves no room for discounts."""
    return discounted_sums(with_outcomes(inputs, rewards), inputs.lengths, 1.0)


# Sums over the tokens of a row


def discounted_sums(values: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """Return y_t = x_t + decay y_{t+1} within each row, [T]; after a row's last token y is 0.

    All rows go backwards at the same time, the longest first in `places`: so the rows that have not ended yet are
    always the first ones, and nothing is padded. The order of the additions is that of the formula.
    """
    result = values.numpy().copy()  # [T] x, which becomes y token by token
    longest_first = lengths.sort(descending=True, stable=True)
    places = (lengths.cumsum(0) - 1)[longest_first.indices].numpy()  # [B] the token each row is at
    sums = np.zeros(len(places), result.dtype)  # [B] y of the token after it
    for count in count_longer_rows(longest_first.values.numpy()):
        now, sums = places[:count], sums[:count]
        sums *= decay
        sums += result[now]
        result[now] = sums
        now -= 1
    return torch.from_numpy(result)


def count_longer_rows(lengths: np.ndarray) -> np.ndarray:
    """Return how many of `lengths` [B] (descending) are above 0, above 1, and so on, [longest]."""
    steps = np.arange(lengths[0] if len(lengths) else 0)
    ended: np.ndarray = np.searchsorted(lengths[::-1], steps, side="right")
    return len(lengths) - ended


def shift_left(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the value of the row's next token, [T]; 0 after the last one."""
    result = torch.cat([values[1:], values[:1]])
    result[last_tokens(lengths)] = 0
    return result


def last_tokens(lengths: Tensor) -> Tensor:
    """Return where the last token of each row that has one stands among all T."""
    return lengths.cumsum(0)[lengths > 0] - 1


# Sums over groups and episodes


def group_sum(values: Tensor, inputs: CreditInput) -> Tensor:
    """Return the sum of `values` [B] over the episodes of each row's group, [B] float64.

    In float64 the mean of equal float32 rewards is that reward exactly, so a group that agrees has advantages of
    exactly 0; in float32 they would be rounding errors, which `group_norm` would blow up to 1.
    """
    return sum_by(inputs.groups, torch.where(count_above(inputs), values, 0))


def group_sizes(inputs: CreditInput) -> Tensor:
    """Return the number of episodes in each row's group, [B] float64."""
    return group_sum(torch.ones_like(inputs.rewards), inputs)


def group_mean(values: Tensor, inputs: CreditInput) -> Tensor:
    """Return the mean of `values` [B] over the episodes of each row's group, [B]."""
    mean = group_sum(values, inputs) / group_sizes(inputs).clamp(min=1)
    return mean.to(values.dtype)


def roles_of(inputs: CreditInput) -> Tensor:
    """Return the number of the role of each row, [B]; zeros where there are no roles."""
    return torch.zeros_like(inputs.groups) if inputs.roles is None else inputs.roles


def has_forks(inputs: CreditInput) -> bool:
    """Return whether an episode has several rows with model tokens."""
    return inputs.episodes is not None and int(count_above(inputs).sum()) < int((inputs.lengths > 0).sum())


def count_above(inputs: CreditInput) -> Tensor:
    """Return which rows stand for their episode in its group, [B] bool: its first row with model tokens."""
    written = inputs.lengths > 0
    if inputs.episodes is None:
        return written
    rows = torch.arange(len(written))
    names, index = inputs.episodes.unique(return_inverse=True)
    first = torch.full_like(names, len(rows)).scatter_reduce(0, index[written], rows[written], "amin")
    return rows == first[index]


def episode_sum(values: Tensor, inputs: CreditInput) -> Tensor:
    """Return the sum of `values` [B] over all rows of each row's episode, [B]."""
    return values if inputs.episodes is None else sum_by(inputs.episodes, values)


def sum_by(names: Tensor, values: Tensor) -> Tensor:
    """Return the sum of `values` [B] over the rows with the same name [B], at each of them, [B] float64."""
    known, index = names.unique(return_inverse=True)
    return torch.zeros(len(known), dtype=torch.float64).index_add(0, index, values.double())[index]


def clip_advantages(advantages: Tensor, clip_range: Sequence[float]) -> Tensor:
    """Return min(max(A, low), high), [T], for `algo.advantage.clip_range` = (low, high) with low <= 0 <= high.

    It bounds the gradient of a single token where a few advantages are far from the others, as after whitening when one
    of many rewards differs. A sign never changes."""
    low, high = clip_range
    return advantages.clamp(low, high)


def whiten_roles(advantages: Tensor, inputs: CreditInput, config: AdvantageConfig) -> Tensor:
    """Return advantages [T] whitened over all tokens of the rollout, those of each role by themselves."""
    result, of_tokens = advantages.clone(), roles_of(inputs).repeat_interleave(inputs.lengths)  # [T]
    for role in of_tokens.unique():
        result[of_tokens == role] = whiten(advantages[of_tokens == role], config.no_std_norm)
    return result


def whiten(advantages: Tensor, no_std_norm: bool) -> Tensor:
    """Return (A - m) / sqrt(max(v, 1e-8)) over all tokens of the rollout, [T], v the biased variance; 0 where all agree
    but for the rounding of float32. `no_std_norm` leaves the division out."""
    if advantages.numel() == 0:
        return advantages
    centred = advantages - advantages.mean()
    if centred.abs().max() <= ROUNDING * advantages.abs().max():
        return torch.zeros_like(advantages)
    if no_std_norm:
        return centred
    return centred * advantages.var(correction=0).clamp(min=1e-8).rsqrt()
