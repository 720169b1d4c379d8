"""An objective's metrics over held-out sets, exact over batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rlhf_suite.config.train import TrainConfig
from rlhf_suite.data.batch import Item
from rlhf_suite.losses.metrics import Metric
from rlhf_suite.train.loader import rank_micro_batches
from rlhf_suite.train.step import add_metrics, balanced_experts, balanced_loss, equalise
from rlhf_suite.train.strategy import TrainedModel
from rlhf_suite.train.task import Objective, SupervisedBatch

Prepare = Callable[[list[SupervisedBatch]], list[SupervisedBatch]]


@torch.no_grad()
def evaluate(
    model: TrainedModel,
    objective: Objective[SupervisedBatch],
    sets: Mapping[str, Sequence[Item]],
    config: TrainConfig,
    prepare: Prepare = list,
) -> dict[str, float]:
    """Return `eval/<set>/<metric>` of every set, and `eval/<metric>` over all of them together (a mean over units).

    `prepare` is what a training step does to its micro-batches before their losses.
    """
    model.module.eval()
    overall: dict[str, Metric] = {}
    result: dict[str, float] = {}
    for name, examples in sets.items():
        metrics = set_metrics(model, objective, examples, config, prepare)
        result |= {f"eval/{name}/{key}": value for key, value in model.world.combined(metrics).items()}
        add_metrics(overall, metrics)
    model.module.train()
    return result | {f"eval/{key}": value for key, value in model.world.combined(overall).items()}


def set_metrics(
    model: TrainedModel,
    objective: Objective[SupervisedBatch],
    examples: Sequence[Item],
    config: TrainConfig,
    prepare: Prepare,
) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for start in range(0, len(examples), config.batch_size):
        chosen = range(start, min(start + config.batch_size, len(examples)))
        batches = prepare(equalise(model, rank_micro_batches(examples, chosen, config, model.world)))
        with balanced_experts(model, batches):
            for batch in batches:
                add_metrics(metrics, balanced_loss(model, objective, batch.to(model.world.device)).metrics)
    return metrics
