"""task=distill: a student learns a teacher's token probabilities on given answers (or, with
actor.pretrain_mode_enable, on every token of plain text), beside the tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import TEACHER, WorkerPlan
from rlhf_suite.data.text_encoders import ConversationEncoder, DocumentEncoder
from rlhf_suite.losses.distillation import distances, with_others
from rlhf_suite.losses.metrics import Mean
from rlhf_suite.losses.reduce import LossSum
from rlhf_suite.models.forward import defer_logits, map_logits
from rlhf_suite.models.head import Rows
from rlhf_suite.models.load import check_teacher
from rlhf_suite.tasks.warm_start import with_warm_starts
from rlhf_suite.train.supervised import run_supervised
from rlhf_suite.train.task import Forward, StepLoss, SupervisedBatch, Task


@dataclass
class Distillation(Task):
    """Minimise (1 - c) x next-token loss + c t^2 x divergence of the distributions at temperature t, over the trained
    tokens.

    t^2 keeps the gradient of the divergence at its size (Hinton et al., section 2). c is `algo.kd_coef`.
    """

    encoder: ConversationEncoder | DocumentEncoder
    algo: AlgoConfig
    vocabulary: int  # tokens that the tokenizer has; models may have more rows, padding of their matrices

    def roles(self) -> dict[str, str]:
        return {"teacher": TEACHER}

    def read_by_loss(self) -> Sequence[Forward]:
        return [self.frozen["teacher"]]

    def units(self, batch: SupervisedBatch) -> dict[str, torch.Tensor]:
        return {"tokens": batch.mask.sum()}

    def loss(self, model: Forward, batch: SupervisedBatch) -> StepLoss:
        tokens = batch.masked  # [N]
        targets, teacher = batch.ids[tokens], defer_logits(self.frozen["teacher"], batch, tokens - 1)

        def read(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
            language = -logits.log_softmax(-1).gather(1, targets[rows, None]).squeeze(1)
            both = self.distributions(self.log_probs(teacher.logits(rows)), self.log_probs(logits))
            return torch.stack([language, distances(self.algo.divergence, *both)], 1)

        losses = map_logits(model, batch, tokens - 1, read).values  # [N, 2]
        language, distance = losses.sum(0)
        coef = self.algo.kd_coef
        total = (1 - coef) * language + coef * self.algo.temperature**2 * distance
        sums = {"loss": total, "gpt_loss": language, "distil_loss": distance}
        metrics = {name: Mean(value.detach(), len(tokens)) for name, value in sums.items()}
        return StepLoss.of("tokens", LossSum(total, metrics))

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits[:, : self.vocabulary] / self.algo.temperature).log_softmax(-1)

    def distributions(self, teacher: torch.Tensor, student: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs [rows, V] of teacher and student; with `algo.top_k` of the teacher's likeliest tokens and
        of the event that it is another, [rows, k + 1]."""
        if self.algo.top_k is None:
            return teacher, student
        largest = teacher.topk(min(self.algo.top_k, self.vocabulary), -1)
        return with_others(largest.values), with_others(student.gather(1, largest.indices))


def make_task(config: Run, tokenizer: PreTrainedTokenizerBase) -> Distillation:
    assert config.teacher.model_name_or_path is not None, "checked with the flags"
    check_teacher(tokenizer, config.teacher.model_name_or_path, config.data)
    encoder = DocumentEncoder if config.actor.pretrain_mode_enable else ConversationEncoder
    return Distillation(encoder(tokenizer, config.data), config.algo, len(tokenizer))


def run(config: Run, folder: Path, plan: WorkerPlan) -> dict[str, float]:
    """Train and return the last metrics; the student is in `<folder>/model`. A built-in teacher is warmed up first."""
    return run_supervised(config, folder, with_warm_starts(plan, config.data.dataset), make_task)
