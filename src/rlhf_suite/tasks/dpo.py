"""task=dpo: a policy from pairs of answers (DPO, cDPO, IPO, hinge, SimPO, ORPO)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import REFERENCE, WorkerPlan, actor_path
from rlhf_suite.data.preferences import PairEncoder
from rlhf_suite.losses.preference import Answers, preference_term
from rlhf_suite.losses.reduce import tokens_per_sequence
from rlhf_suite.models.forward import response_log_probs
from rlhf_suite.models.load import vision_processor
from rlhf_suite.train.supervised import run_supervised
from rlhf_suite.train.task import Forward, StepLoss, SupervisedBatch, Task, mark_counted


@dataclass
class DPO(Task):
    """Train the chosen answer to gain on the rejected one. Even sequences of a batch are chosen."""

    encoder: PairEncoder
    algo: AlgoConfig
    annotates_once: bool
    main_metric: str = "acc"

    def roles(self) -> dict[str, str]:
        if not self.algo.needs("reference"):
            return {}
        return {"reference": REFERENCE}

    def annotate(self, batch: SupervisedBatch) -> dict[str, torch.Tensor]:
        return {"reference": response_log_probs(self.frozen["reference"], batch).values}

    def units(self, batch: SupervisedBatch) -> dict[str, torch.Tensor]:
        return {"pairs": mark_counted(batch)[::2].sum()}

    def loss(self, model: Forward, batch: SupervisedBatch) -> StepLoss:
        log_probs = response_log_probs(model, batch).values  # [2P]
        reference = torch.zeros_like(log_probs) if batch.reference is None else batch.reference
        tokens = tokens_per_sequence(batch.mask, batch.segments, len(batch))
        chosen, rejected = (Answers(log_probs[i::2], reference[i::2], tokens[i::2]) for i in (0, 1))
        loss = preference_term(chosen, rejected, mark_counted(batch)[::2], self.algo)
        return StepLoss.of("pairs", loss)


def make_task(config: Run, tokenizer: PreTrainedTokenizerBase) -> DPO:
    reader = vision_processor(actor_path(config), config.data.image_key)
    return DPO(PairEncoder(tokenizer, config.data, reader=reader), config.algo, config.ref.cache_enable)


def run(config: Run, folder: Path, plan: WorkerPlan) -> dict[str, float]:
    """Train and return the last metrics; the policy is in `<folder>/model`."""
    return run_supervised(config, folder, plan, make_task)
