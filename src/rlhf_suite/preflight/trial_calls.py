"""Calls of the user's algorithms with a few numbers, by which a trial finds what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from rlhf_suite.algo.advantage import CreditInput, Numbers, assign_credit
from rlhf_suite.algo.correction import CorrectionInput, correction_weights
from rlhf_suite.algo.kl import estimate_kl
from rlhf_suite.algo.scores import aggregate
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig
from rlhf_suite.config.declarations.models import ActorConfig, TrainedModelConfig
from rlhf_suite.config.declarations.teacher import TeacherConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.losses.distillation import distances
from rlhf_suite.losses.policy import PolicyTokens, policy_term
from rlhf_suite.losses.preference import Answers, preference_term, reward_term
from rlhf_suite.losses.reduce import num_units
from rlhf_suite.registry import estimator
from rlhf_suite.rl.sharding import ForwardBatch
from rlhf_suite.rl.teachers import TeacherSetup, make_ask, read_answer
from rlhf_suite.train.schedules import learning_rate_factor

TOKENS, ROWS = torch.linspace(0.1, 0.5, 5), torch.tensor([1.0, 0.0])
SEGMENTS, LENGTHS = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([2, 3])
MASK = torch.ones(5)
CREDIT = CreditInput(
    ROWS, 0.1 * TOKENS, LENGTHS, torch.zeros(2, dtype=torch.long), TOKENS, ROWS, entropies=TOKENS, kl_coef=0.1
)
POLICY = PolicyTokens(-TOKENS, -TOKENS, TOKENS, MASK, SEGMENTS, 2, chosen=MASK.bool())
ANSWERS = Answers(-ROWS - 1, -ROWS - 1, LENGTHS)
LOG_PROBS = torch.full((5, 2), 0.5).log()


def correct(mode: str = "mask", gating: str = "ratio") -> torch.Tensor:
    """Return the weights of a correction by these algorithms."""
    config = AdvantageConfig(is_correction_level="token", is_correction_mode=mode, is_correction_gating=gating)
    return correction_weights(CorrectionInput(-TOKENS, -1.1 * TOKENS, MASK, LENGTHS), config)


@dataclass(frozen=True)
class Even:
    """A model in place of a policy or a teacher, for which all tokens are equally likely."""

    num_tokens: int = 0

    def log_probs(self, batch: ForwardBatch, temperature: float) -> Even:
        """Return the answer for a batch."""
        return Even(batch.tokens.num_tokens)

    log_probs_of_average = log_probs

    def result(self) -> torch.Tensor:
        """Return the answer as numbers."""
        return torch.full((self.num_tokens,), 0.5).log()


def ask_teacher(kind: str) -> torch.Tensor:
    """Return what a teacher of a kind says of two sequences."""
    config, model = TeacherConfig.of("ppo", kind=kind), cast(Any, Even())
    setup = TeacherSetup("teacher", config, config, model, model)
    batch = TokenBatch(torch.arange(5), LENGTHS, MASK)
    return read_answer(kind, make_ask(setup)(ForwardBatch(batch), 1.0), 5)


CALLS: Mapping[str, Callable[[str], object]] = {
    "estimator": lambda name: assign_credit(
        replace(CREDIT, numbers=Numbers(dict.fromkeys(estimator.numbers(name), ROWS))), AdvantageConfig(estimator=name)
    ),
    "correction": lambda name: correct(mode=name),
    "gating": lambda name: correct(gating=name),
    "policy_loss": lambda name: policy_term(POLICY, ActorConfig.of("ppo", policy_loss_type=name), MASK, MASK.sum()),
    "aggregation": lambda name: num_units(MASK, SEGMENTS, 2, name),
    "preference_loss": lambda name: preference_term(ANSWERS, ANSWERS, ROWS, AlgoConfig.of("dpo", loss=name)),
    "reward_loss": lambda name: reward_term(ROWS, ROWS, ROWS, ROWS, name),
    "divergence": lambda name: distances(name, LOG_PROBS, LOG_PROBS),
    "kl_estimator": lambda name: estimate_kl(-TOKENS, -TOKENS, name),
    "schedule": lambda name: learning_rate_factor(9, 10, TrainedModelConfig.of("ppo", lr_scheduler=name)),
    "step_aggregate": lambda name: aggregate([0.5, 0.25], name),
    "teacher": ask_teacher,
}
