"""A trained process reward model (PRM): P(good) of every step of a solution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_suite.algo.scores import aggregate
from rlhf_suite.config import name_program
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.steps import SolutionEncoder, StepFormat
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import map_logits
from rlhf_suite.models.head import Rows
from rlhf_suite.models.load import load_tokenizer, read_config

KEY = "process_reward"  # the key of the step format in config.json


@dataclass(frozen=True)
class StepScores:
    """P(good) of the steps of a solution, in order. If it was too long and `truncated`, its last steps are missing."""

    scores: list[float]
    truncated: bool = False

    def aggregate(self, how: str) -> float:
        """Return their min, product, last or mean; 0 if there are no steps."""
        return aggregate(self.scores, how)


def step_probabilities(model: Callable[..., Any], batch: TokenBatch, columns: Sequence[int]) -> Tensor:
    """Return P(good) at every masked token, which is a placeholder, and 0 elsewhere, [T].

    It is the softmax of the logits at the placeholder itself over the reward tokens `columns`, the good one first.
    """
    at = batch.masked  # [N]

    def good(logits: Tensor, _: Rows) -> Tensor:
        return select_columns(logits, columns).softmax(-1)[:, 0]

    probabilities = map_logits(model, batch, at, good).values  # [N]
    return probabilities.new_zeros(batch.num_tokens).index_copy(0, at, probabilities)


def select_columns(logits: Tensor, columns: Sequence[int]) -> Tensor:
    """Return some columns of logits [N, V], [N, C]. With a list as index they would wait for a copy of it."""
    return torch.stack([logits[:, column] for column in columns], 1)


def split_step_scores(batch: TokenBatch, probabilities: Tensor, truncated: Sequence[bool]) -> list[StepScores]:
    """Return the step scores of each solution, from `probabilities` [T]."""
    rows = zip(batch.mask.bool().split(batch.lengths.tolist()), truncated, strict=True)
    values = probabilities.split(batch.lengths.tolist())
    return [StepScores(own[mask].tolist(), cut) for own, (mask, cut) in zip(values, rows, strict=True)]


def solution_encoder(path: str, flag: str, step_separator: str | None = None) -> SolutionEncoder:
    """Return the encoder of solutions for the model at `path`, with its own tokenizer, step format and template.

    Raises:
        UserError: config.json has no step format, so task=prm with reward tokens did not train the model.
    """
    saved = getattr(read_config(path, flag), KEY, None)
    if saved is None:
        raise UserError(
            f"{flag}={path}: its config.json has no {KEY}, so it was not trained by task=prm with algo.reward_tokens. "
            f"Train one: {name_program()} task=prm 'algo.reward_tokens=[+,-]' ..."
        )
    return SolutionEncoder(load_tokenizer(path, DataConfig.of("prm"), flag), StepFormat.read(saved), step_separator)
