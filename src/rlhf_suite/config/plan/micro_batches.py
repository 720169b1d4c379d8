"""What a micro-batch has, decided once from the flags: so many rows, or as many as make so many tokens."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.declarations.rollout import RolloutConfig
from rlhf_suite.config.declarations.train import TrainConfig

LEAST_TOKENS = 4096  # of a micro-batch, where no flag says otherwise and no plan has decided for more


@dataclass(frozen=True)
class MicroBatches:
    """The limit of a micro-batch: `rows`, or `tokens` on each rank that has a part of them. Padding counts as tokens,
    and a row of more tokens raises the limit of its step to its own length."""

    rows: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        assert (self.rows is None) != (self.tokens is None), "either rows or tokens"


def trained_micro_batches(train: TrainConfig) -> MicroBatches:
    """Return what a micro-batch of an optimiser step has."""
    return _choose(train, train.micro_batch_size, train.max_tokens_per_gpu)


def rollout_micro_batches(rollout: RolloutConfig, train: TrainConfig) -> MicroBatches:
    """Return what a forward pass over a rollout takes at once."""
    return _choose(train, rollout.micro_batch_size, rollout.max_tokens_per_gpu or train.max_tokens_per_gpu)


def _choose(train: TrainConfig, rows: int | None, tokens: int | None) -> MicroBatches:
    """Return the limit by rows where their number is written and train.dynamic_batch_enable is not."""
    if rows is None or train.dynamic_batch_enable:
        return MicroBatches(tokens=tokens or LEAST_TOKENS)
    return MicroBatches(rows=rows)
