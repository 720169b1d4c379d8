"""task=rm: a reward model from pairs of answers; one score per sequence, read at its last token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import WorkerPlan, actor_path
from rlhf_suite.data.preferences import PairEncoder
from rlhf_suite.losses.preference import reward_term
from rlhf_suite.models.forward import sequence_scores
from rlhf_suite.models.load import vision_processor
from rlhf_suite.train.supervised import run_supervised
from rlhf_suite.train.task import Forward, StepLoss, SupervisedBatch, Task, mark_counted


@dataclass
class RewardModel(Task):
    """Train the chosen answer to score higher than the rejected one. Even sequences of a batch are chosen."""

    encoder: PairEncoder
    kind: str
    main_metric: str = "acc"

    def units(self, batch: SupervisedBatch) -> dict[str, torch.Tensor]:
        return {"pairs": mark_counted(batch)[::2].sum()}

    def loss(self, model: Forward, batch: SupervisedBatch) -> StepLoss:
        scores = sequence_scores(model, batch)  # [2P]
        margin = (torch.zeros_like(scores) if batch.margin is None else batch.margin)[::2]
        loss = reward_term(scores[::2], scores[1::2], margin, mark_counted(batch)[::2], self.kind)
        return StepLoss.of("pairs", loss)


def make_task(config: Run, tokenizer: PreTrainedTokenizerBase) -> RewardModel:
    reader = vision_processor(actor_path(config), config.data.image_key)
    encoder = PairEncoder(tokenizer, config.data, config.data.margin_key, reader)
    return RewardModel(encoder, config.algo.loss)


def run(config: Run, folder: Path, plan: WorkerPlan) -> dict[str, float]:
    """Train and return the last metrics; the reward model is in `<folder>/model`."""
    return run_supervised(config, folder, plan, make_task)
