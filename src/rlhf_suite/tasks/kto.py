"""task=kto: a policy from single answers, each desirable or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import REFERENCE, WorkerPlan
from rlhf_suite.data.batch import Item, require_column, take
from rlhf_suite.data.preferences import LabelledEncoder, MismatchedPairs
from rlhf_suite.losses.preference import kto_loss, reference_point
from rlhf_suite.models.forward import response_log_probs
from rlhf_suite.train.supervised import run_supervised
from rlhf_suite.train.task import Forward, StepLoss, SupervisedBatch, Task, Total, mark_counted


@dataclass
class KTO(Task):
    """Train desirable answers to gain on the KL reference point of the step, undesirable ones to fall behind it.

    The point is a mean over the whole step, so it is measured before the first backward pass: on mismatched answers
    (every second sequence of a batch, gone once measured), or with `algo.loss=vanilla` on those of the other class.
    """

    encoder: LabelledEncoder
    algo: AlgoConfig
    annotates_once: bool

    def assemble(self, items: Sequence[Item]) -> Sequence[Item]:
        if self.algo.loss == "vanilla":
            return items
        return MismatchedPairs(items, self.encoder.config.max_len)

    def roles(self) -> dict[str, str]:
        return {"reference": REFERENCE}

    def annotate(self, batch: SupervisedBatch) -> dict[str, torch.Tensor]:
        return {"reference": response_log_probs(self.frozen["reference"], batch).values}

    def before_step(self, model: Forward, batches: list[SupervisedBatch], total: Total) -> list[SupervisedBatch]:
        vanilla = self.algo.loss == "vanilla"
        device = batches[0].ids.device
        sums = torch.zeros(2, 2, dtype=torch.float64, device=device)  # sum and count of log-ratios, for each label
        for batch in batches:
            measured = batch if vanilla else every_second(batch, 1)
            ratios = response_log_probs(model, measured).values - require_column(measured.reference, "reference")
            for label in (0, 1):
                weights = mark_counted(measured) * (
                    require_column(measured.label, "label") == 1 - label if vanilla else 1
                )
                sums[label] += torch.stack([(weights * ratios).sum(), weights.sum()]).double()
        points = reference_point(*total(sums).T).float()
        matched = batches if vanilla else [every_second(batch, 0) for batch in batches]
        return [replace(batch, kl=points.to(device)[require_column(batch.label, "label").long()]) for batch in matched]

    def units(self, batch: SupervisedBatch) -> dict[str, torch.Tensor]:
        return {"answers": mark_counted(batch).sum()}

    def loss(self, model: Forward, batch: SupervisedBatch) -> StepLoss:
        log_probs = response_log_probs(model, batch).values
        ratios = log_probs - require_column(batch.reference, "reference")
        label, kl = require_column(batch.label, "label"), require_column(batch.kl, "kl")
        loss = kto_loss(ratios, label, kl, mark_counted(batch), self.algo)
        return StepLoss.of("answers", loss)


def every_second(batch: SupervisedBatch, first: int) -> SupervisedBatch:
    return take(batch, range(first, len(batch), 2))


def make_task(config: Run, tokenizer: PreTrainedTokenizerBase) -> KTO:
    return KTO(LabelledEncoder(tokenizer, config.data), config.algo, config.ref.cache_enable)


def run(config: Run, folder: Path, plan: WorkerPlan) -> dict[str, float]:
    """Train and return the last metrics; the policy is in `<folder>/model`."""
    return run_supervised(config, folder, plan, make_task)
