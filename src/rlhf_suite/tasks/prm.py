"""task=prm: a process reward model, a language model that says at every step's placeholder how good the step was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import WorkerPlan
from rlhf_suite.data.batch import require_column
from rlhf_suite.data.steps import StepEncoder, StepFormat
from rlhf_suite.losses.tokens import step_loss, step_ranking
from rlhf_suite.models.forward import map_logits
from rlhf_suite.models.head import Rows
from rlhf_suite.models.process_reward_model import KEY, select_columns
from rlhf_suite.train.supervised import run_supervised
from rlhf_suite.train.task import Forward, StepLoss, SupervisedBatch, Task


@dataclass
class ProcessRewardModel(Task):
    """Train the logits at a placeholder, its own and not those of the token before it, to favour the step's label."""

    encoder: StepEncoder
    form: StepFormat | None
    main_metric: str = "acc"

    def extras(self) -> dict[str, object]:
        """Return what scoring with the model needs to know."""
        return {} if self.form is None else {KEY: self.form.to_json()}

    def units(self, batch: SupervisedBatch) -> dict[str, torch.Tensor]:
        return {"steps": batch.mask.sum()}

    def loss(self, model: Forward, batch: SupervisedBatch) -> StepLoss:
        at = batch.masked  # [N]

        def reward_logits(logits: torch.Tensor, _: Rows) -> torch.Tensor:
            return logits if self.encoder.columns is None else select_columns(logits, self.encoder.columns)

        logits = map_logits(model, batch, at, reward_logits).values
        labels = require_column(batch.target, "target")[at].long(), require_column(batch.weight, "weight")[at]
        loss = step_loss(logits, *labels)
        if self.encoder.columns is not None:  # which of the whole vocabulary are good is not known
            loss = replace(loss, metrics={**loss.metrics, "auc": step_ranking(logits, *labels)})
        return StepLoss.of("steps", loss)


def make_task(config: Run, tokenizer: PreTrainedTokenizerBase) -> ProcessRewardModel:
    encoder, form = StepEncoder(tokenizer, config.data, config.algo), StepFormat.of(config.data, config.algo)
    return ProcessRewardModel(encoder, form)


def run(config: Run, folder: Path, plan: WorkerPlan) -> dict[str, float]:
    """Train and return the last metrics; the model is in `<folder>/model`."""
    return run_supervised(config, folder, plan, make_task)
