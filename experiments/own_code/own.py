"""Your own algorithms, in one file outside of the suite. Each function is named on the command line by this file:

    python run.py task=ppo algo.advantage.estimator=experiments/own_code/own.py:median_baseline
    python run.py task=ppo actor.policy_loss_type=experiments/own_code/own.py:squared_ratio
    python run.py task=ppo correction=tis algo.advantage.is_correction_mode=experiments/own_code/own.py:bounded_above
    python run.py task=ppo reward.rule=experiments/own_code/own.py:first_digit data.label_key=label
    python run.py task=dpo algo.loss=experiments/own_code/own.py:exponential
    python run.py task=sft data.row_format=experiments/own_code/own.py:question_and_answer
    python run.py task=sft actor.lr_scheduler=experiments/own_code/own.py:square_root

A decorator says what a function needs of a run and which flags it reads. Without a decorator the function may read any
flag, and has the usual needs of its kind (an estimator: rewards; a preference loss: the reference model).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_suite.algo.advantage import Credit, CreditInput, compute_reward_to_go, whole_rewards
from rlhf_suite.algo.correction import CorrectionInput, band
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig
from rlhf_suite.config.declarations.models import ActorConfig, TrainedModelConfig
from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.losses.policy import PolicyTokens, TokenLosses, clip_range
from rlhf_suite.losses.preference import Answers
from rlhf_suite.registry import correction, estimator, policy_loss, preference_loss, reward_rule, schedule
from rlhf_suite.rewards.base import Sample
from rlhf_suite.train.schedules import Moment


@estimator(needs=("rewards", "groups"))
def median_baseline(inputs: CreditInput, config: AdvantageConfig) -> Credit:
    """The reward less the median reward of the responses to the same prompt."""
    rewards = whole_rewards(inputs)  # [B]
    written = inputs.lengths > 0  # a row without model tokens takes part in nothing
    baseline = torch.zeros_like(rewards)
    for group in inputs.groups[written].unique():
        members = written & (inputs.groups == group)
        baseline[members] = rewards[members].median()
    returns = compute_reward_to_go(inputs, rewards - baseline)  # [T]
    return Credit(returns, returns)


@policy_loss(reads=("eps_clip", "eps_clip_low_high"))
def squared_ratio(tokens: PolicyTokens, config: ActorConfig) -> TokenLosses:
    """-rho_t A_t, with a squared penalty on a ratio outside of the clip range in place of the clip."""
    low, high = clip_range(config)
    ratio = tokens.log_ratio.clamp(-20, 20).exp()  # [T]
    outside = F.relu(ratio - 1 - high) + F.relu(1 - low - ratio)
    return TokenLosses(-ratio * tokens.advantages + outside.square(), outside > 0, ratio > 1)


@correction(reads=("is_correction_threshold",))
def bounded_above(inputs: CorrectionInput, config: AdvantageConfig) -> Tensor:
    """p / q, which is 0 below the band [low, high] and high above it."""
    low, high = band(config)
    weights = inputs.log_weights.exp()  # [T]
    return torch.where(weights < low, 0, weights.clamp(max=high))


@preference_loss(needs=("reference",))
def exponential(chosen: Answers, rejected: Answers, config: AlgoConfig) -> Tensor:
    """exp(-h), with h = beta x the difference of the two answers' log-ratios to the reference."""
    return torch.exp(-config.beta * (chosen.log_ratios - rejected.log_ratios))


@reward_rule(needs=("label",))
def first_digit(row: Sample, config: RuleConfig) -> float:
    """1 when the response begins with the first character of the label."""
    return float(row.response.strip()[:1] == row.label.strip()[:1])


@schedule(reads=("lr_warmup_ratio",))
def square_root(moment: Moment, config: TrainedModelConfig) -> float:
    """The square root of the share of the steps that are left."""
    return max(0.0, 1 - moment.progress) ** 0.5


def question_and_answer(row: dict[str, object]) -> dict[str, object] | None:
    """Return the columns that task=sft reads; rows without an answer are not used."""
    if not row.get("solution"):
        return None
    return {"input": f"Question: {row['problem']}\nAnswer: ", "output": row["solution"]}
