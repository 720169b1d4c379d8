"""An objective's metrics over held-out sets, exact over batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.data.batch import Item
from rlhf_suite.losses.metrics import Metric
from rlhf_suite.train.loader import rank_micro_batches
from rlhf_suite.train.step import add_balance_loss, add_metrics, balance_experts, equalise
from rlhf_suite.train.strategy import TrainedModel
from rlhf_suite.train.task import Objective, SupervisedBatch

Prepare = Callable[[list[SupervisedBatch]], list[SupervisedBatch]]


class Evaluation:
    """The measurement of an objective over sets, in `parts` of at most train.batch_size items of one set.

    `prepare` is what a training step does to its micro-batches before their losses.
    """

    def __init__(
        self,
        model: TrainedModel,
        objective: Objective[SupervisedBatch],
        sets: Mapping[str, Sequence[Item]],
        config: TrainConfig,
        prepare: Prepare = list,
    ) -> None:
        self.model, self.objective, self.sets, self.config, self.prepare = model, objective, sets, config, prepare
        size = config.batch_size
        self.parts = [
            (name, range(start, min(start + size, len(items))))
            for name, items in sets.items()
            for start in range(0, len(items), size)
        ]
        self.metrics: dict[str, dict[str, Metric]] = {name: {} for name in sets}

    @torch.no_grad()
    def measure(self, part: int) -> None:
        """Add the metrics of one part. The model is in training mode before and after."""
        (name, chosen), model = self.parts[part], self.model
        model.module.eval()
        batches = rank_micro_batches(self.sets[name], chosen, self.config, model.world, model.module.packed)
        batches = self.prepare(equalise(model, batches))
        with balance_experts(model, batches):
            for batch in batches:
                batch_metrics = add_balance_loss(model, self.objective, batch.to(model.world.device)).metrics
                add_metrics(self.metrics[name], batch_metrics)
        model.module.train()

    def result(self) -> dict[str, float]:
        """Return `eval/<set>/<metric>` of every set, and `eval/<metric>` over all of them (a mean over units)."""
        overall: dict[str, Metric] = {}
        result: dict[str, float] = {}
        for name, metrics in self.metrics.items():
            result |= {f"eval/{name}/{key}": value for key, value in self.model.world.combine(metrics).items()}
            add_metrics(overall, metrics)
        return result | {f"eval/{key}": value for key, value in self.model.world.combine(overall).items()}


def evaluate(
    model: TrainedModel,
    objective: Objective[SupervisedBatch],
    sets: Mapping[str, Sequence[Item]],
    config: TrainConfig,
    prepare: Prepare = list,
) -> dict[str, float]:
    """Return the result of a whole evaluation."""
    evaluation = Evaluation(model, objective, sets, config, prepare)
    for part in range(len(evaluation.parts)):
        evaluation.measure(part)
    return evaluation.result()
