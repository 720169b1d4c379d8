"""Mean of an objective's metrics over held-out sets, exact over batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlhf_suite.config.train import TrainConfig
from rlhf_suite.data.batch import Example
from rlhf_suite.losses.reduce import Mean
from rlhf_suite.train.loader import rank_micro_batches
from rlhf_suite.train.step import add_metrics
from rlhf_suite.train.strategy import TrainedModel
from rlhf_suite.train.task import Objective


@torch.no_grad()
def evaluate(
    model: TrainedModel, objective: Objective, sets: Mapping[str, Sequence[Example]], config: TrainConfig
) -> dict[str, float]:
    """`eval/<set>/<metric>` of every set, and `eval/<metric>` over all of them together (a mean over units)."""
    model.module.eval()
    overall: dict[str, Mean] = {}
    result: dict[str, float] = {}
    for name, examples in sets.items():
        metrics = set_metrics(model, objective, examples, config)
        result |= {f"eval/{name}/{key}": value for key, value in model.world.sum_means(metrics).items()}
        add_metrics(overall, metrics)
    model.module.train()
    return result | {f"eval/{key}": value for key, value in model.world.sum_means(overall).items()}


def set_metrics(
    model: TrainedModel, objective: Objective, examples: Sequence[Example], config: TrainConfig
) -> dict[str, Mean]:
    metrics: dict[str, Mean] = {}
    for start in range(0, len(examples), config.batch_size):
        chosen = range(start, min(start + config.batch_size, len(examples)))
        batches = rank_micro_batches(examples, chosen, config, model.world)
        rounds = int(model.world.max(torch.tensor(float(len(batches)))))
        for index in range(rounds):  # a rank that has run out repeats its first batch for the collectives of ZeRO-3
            loss = objective.loss(model, batches[index % len(batches)].to(model.world.device))
            if index < len(batches):
                add_metrics(metrics, loss.metrics)
    return metrics
