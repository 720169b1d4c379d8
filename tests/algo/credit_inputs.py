"""What estimators read, made up, and their credit."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from rlhf_suite.algo.advantage import Credit, CreditInput, assign_credit
from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.registry import estimator

WHITENED = ("gae", "reinforce", "reinforce_baseline")
ESTIMATORS = estimator.without("parts")  # gdpo reads no rewards: tests/algo/test_group_objectives.py
BASELINES = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "flash_reinforce", "opo", "remax")
ROWS = 12
PER_TOKEN = ("kl_penalty", "values", "turn_rewards")
float64 = torch.float64


def inputs(rewards, lengths, groups=None, episodes=None, **further) -> CreditInput:
    """Rows of so many tokens; what is per token is one flat list."""
    given = {name: torch.tensor(values, dtype=float64) for name, values in further.items()}
    return CreditInput(
        rewards=torch.tensor(rewards, dtype=float64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        groups=torch.tensor([0] * len(lengths) if groups is None else groups, dtype=torch.int64),
        episodes=None if episodes is None else torch.tensor(episodes, dtype=torch.int64),
        **{"kl_penalty": torch.zeros(sum(lengths), dtype=float64), **given},
    )


def random_inputs(seed: int = 0) -> CreditInput:
    """Three groups of four rows of 1 to 9 tokens, whose rewards are above 0; row 5 is empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (ROWS,), generator=generator)
    lengths[5] = 0
    tokens = int(lengths.sum())
    return CreditInput(
        rewards=2 * torch.rand(ROWS, generator=generator, dtype=float64),
        kl_penalty=0.1 * torch.randn(tokens, generator=generator, dtype=float64),
        lengths=lengths,
        groups=torch.arange(ROWS) % 3,
        values=torch.randn(tokens, generator=generator, dtype=float64),
        greedy=torch.randn(3, generator=generator, dtype=float64)[torch.arange(ROWS) % 3],
        turn_rewards=torch.rand(tokens, generator=generator, dtype=float64),
    )


def without_kl(given: CreditInput) -> CreditInput:
    return replace(given, kl_penalty=torch.zeros_like(given.kl_penalty))


def of_rows(values: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What belongs to the tokens of some of the rows."""
    parts = values.split(lengths.tolist())
    return torch.cat([parts[row] for row in rows.tolist()])


def chosen(given: CreditInput, rows: torch.Tensor) -> CreditInput:
    """Some of the rows, or all in another order."""
    found = {
        name: of_rows(value, given.lengths, rows) if name in PER_TOKEN else value[rows]
        for name, value in tensors_of(given).items()
    }
    return replace(given, **found)


def tensors_of(given: CreditInput) -> dict[str, torch.Tensor]:
    found = {each.name: getattr(given, each.name) for each in fields(given)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def run(name: str, given: CreditInput, **options) -> Credit:
    return assign_credit(given, AdvantageConfig(estimator=name, **options))


def of_last_tokens(credit: Credit, given: CreditInput) -> torch.Tensor:
    """Without a KL penalty and turns: what is left of each row's reward, [rows that are not empty]."""
    return credit.advantages[given.lengths.cumsum(0)[given.lengths > 0] - 1]


def assert_same(one: Credit, other: Credit) -> None:
    torch.testing.assert_close(one.advantages, other.advantages)
    torch.testing.assert_close(one.returns, other.returns)
