"""task=sft: next-token loss on the answers (or, with actor.pretrain_mode_enable, on every token)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import WorkerPlan, actor_path
from rlhf_suite.data.text_encoders import ConversationEncoder, DocumentEncoder
from rlhf_suite.losses.tokens import next_token_loss
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.load import vision_processor
from rlhf_suite.train.supervised import run_supervised
from rlhf_suite.train.task import Forward, StepLoss, SupervisedBatch, Task


@dataclass
class SFT(Task):
    """Minimise the mean of -log p over the trained tokens."""

    encoder: ConversationEncoder | DocumentEncoder
    main_metric: str = "gpt_loss"

    def units(self, batch: SupervisedBatch) -> dict[str, torch.Tensor]:
        return {"tokens": batch.mask.sum()}

    def loss(self, model: Forward, batch: SupervisedBatch) -> StepLoss:
        mask = batch.mask
        log_probs = token_log_probs(model, batch, masked=True).log_probs
        return StepLoss.of("tokens", next_token_loss(log_probs, mask))


def make_task(config: Run, tokenizer: PreTrainedTokenizerBase) -> SFT:
    if config.actor.pretrain_mode_enable:
        return SFT(DocumentEncoder(tokenizer, config.data))
    return SFT(ConversationEncoder(tokenizer, config.data, vision_processor(actor_path(config), config.data.image_key)))


def run(config: Run, folder: Path, plan: WorkerPlan) -> dict[str, float]:
    """Train and return the last metrics; the model is in `<folder>/model`."""
    return run_supervised(config, folder, plan, make_task)
