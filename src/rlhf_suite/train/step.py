"""One optimiser step, exact whatever the micro-batch size, packing, number of ranks or ZeRO stage.

The loss of a step is sum over units u of (sum of losses over u) / (number of u), where the number is counted over all
micro-batches and all ranks before the first forward. Each micro-batch then backs up its own share of that sum.
The load-balancing loss of a mixture of experts is added here, to every objective alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_suite.data.batch import B, TokenBatch, kind_of, require_column, weightless
from rlhf_suite.distributed.world import World
from rlhf_suite.errors import RunError
from rlhf_suite.losses.metrics import Mean, Metric
from rlhf_suite.models.experts import expert_shares
from rlhf_suite.models.forward import expert_counts
from rlhf_suite.train.strategy import TrainedModel
from rlhf_suite.train.task import Objective, StepLoss, count_tokens

NAMED = 20  # sequences that an error message lists
ALL_TOKENS = "all_tokens"  # the unit of the load-balancing loss


def optimizer_step(
    model: TrainedModel,
    objective: Objective[B],
    micro_batches: Sequence[B],
    step: int,
    on_nonfinite: str,
    name: Callable[[int], str] = "sequence {}".format,
) -> dict[str, float]:
    """Run the backward pass of all micro-batches and update once; return the metrics of the step, exact over ranks,
    with `grad_norm` and `lr`.

    Every rank calls it with its own micro-batches (possibly of different number). A loss or gradient norm that is not
    finite never reaches the optimiser: `on_nonfinite` says whether the run stops or the step is skipped (`skipped` 1).
    `name` makes an `index` of a row readable.
    """
    done = accumulate(model, objective, micro_batches)
    result = update(model, [done], step, on_nonfinite, name)
    return model.world.combine(done.metrics) | result


@dataclass(frozen=True)
class Accumulated:
    """Micro-batches whose gradients have been added up, with what an update needs to know of them."""

    micro_batches: Sequence[TokenBatch]
    finite: Sequence[torch.Tensor]  # of each, on the device: whether its loss is
    metrics: Mapping[str, Metric]

    @property
    def suspects(self) -> list[int]:
        """The `index` of every sequence of the micro-batches whose loss is not finite."""
        bad = [batch for batch, flag in zip(self.micro_batches, self.finite, strict=True) if not flag]
        return [number for batch in bad for number in require_column(batch.index, "index").tolist()]


def accumulate(
    model: TrainedModel,
    objective: Objective[B],
    micro_batches: Sequence[B],
    counts: Mapping[str, float] | None = None,
    *,
    backward: bool = True,
) -> Accumulated:
    """Add the gradients of all micro-batches to those that wait for the next update; without `backward` compute their
    losses alone.

    The loss is a sum over units divided by `counts`, the number of each; None: that of these micro-batches, on all
    ranks. Every rank calls it with its own micro-batches (possibly of different number).
    """
    world = model.world
    micro_batches = equalise(model, micro_batches)
    counts = global_counts(objective, micro_batches, world) if counts is None else counts
    metrics: dict[str, Metric] = {}
    finite: list[torch.Tensor] = []
    with balance_experts(model, micro_batches):
        for number, micro_batch in enumerate(micro_batches, start=1):
            loss = add_balance_loss(model, objective, micro_batch.to(world.device))
            share = weigh_share(loss, counts)
            finite.append(share.detach().isfinite())
            if backward:
                # The gradient of a loss that is not finite may be finite: no optimiser takes NaN.
                model.backward(share * torch.where(finite[-1], 1.0, math.nan), last=number == len(micro_batches))
            add_metrics(metrics, loss.metrics)
    return Accumulated(micro_batches, finite, metrics)


def update(
    model: TrainedModel,
    accumulated: Sequence[Accumulated],
    step: int,
    on_nonfinite: str,
    name: Callable[[int], str] = "sequence {}".format,
    rate: float | None = None,
) -> dict[str, float]:
    """Update once with the gradients of what was accumulated; return `grad_norm`, `lr` and `skipped`. `rate`: the
    learning rate in place of that of the schedule at `step`.

    Raises:
        RunError: a loss or the gradient norm is not finite, and `on_nonfinite` is "stop".
    """
    result = model.step(step, rate)
    skipped = not math.isfinite(result["grad_norm"])
    if skipped and on_nonfinite == "stop":
        suspects = [index for part in accumulated for index in part.suspects]
        raise nonfinite(step, [name(index) for index in sorted(model.world.gather(suspects))])
    return result | {"skipped": float(skipped)}


def equalise(model: TrainedModel, micro_batches: Sequence[B]) -> list[B]:
    """Return as many micro-batches of each kind on every rank, kind after kind, where the passes have collectives:
    weightless copies of the first one of a kind are added.

    Each kind runs modules of its own (documents have no entropy, images pass through their tower), and ZeRO-3 gathers
    module by module: ranks that ran different kinds at the same time would wait for each other for ever. Every rank
    has every kind, if only a weightless one.
    """
    if not model.needs_equal_micro_batches:
        return [*micro_batches]
    own: dict[str, list[B]] = {}
    for batch in micro_batches:
        own.setdefault(kind_of(batch), []).append(batch)
    counts = model.world.gather([{kind: len(batches) for kind, batches in own.items()}])
    kinds = list(counts[0])
    assert all({*count} == {*kinds} for count in counts), f"every rank has every kind of micro-batch: {counts}"
    wanted = {kind: max(count[kind] for count in counts) for kind in kinds}
    copies = {kind: [weightless(own[kind][0])] * (wanted[kind] - len(own[kind])) for kind in kinds}
    return [batch for kind in kinds for batch in (*own[kind], *copies[kind])]


@contextmanager
def balance_experts(model: TrainedModel, micro_batches: Sequence[TokenBatch]) -> Iterator[None]:
    """Make the load-balancing loss of the micro-batches that of all of them, on all ranks, as one batch. That takes a
    forward pass beforehand, which counts the tokens that go to each expert, unless there is only one batch."""
    balance, world = model.module.balance, model.world
    if balance is None or (world.mesh.size == 1 and len(micro_batches) == 1):
        yield
        return
    training = model.module.training
    model.module.eval()  # no dropout, no noise in the routers: the pass measures the model
    with torch.no_grad():
        counts = torch.stack([expert_counts(model, batch.to(world.device)) for batch in micro_batches]).sum(0)
    model.module.train(training)
    balance.shares = expert_shares(world.sum(counts), balance.top_k)
    try:
        yield
    finally:
        balance.shares = None


@dataclass
class RecordingForward:
    """Runs the trained model for an objective, and keeps the load-balancing loss of that forward pass."""

    model: TrainedModel
    aux_loss: torch.Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.aux_loss is None, "an objective runs the model it trains once per micro-batch"
        outputs = self.model(*args, **kwargs)
        self.aux_loss = outputs.aux_loss
        return outputs


def add_balance_loss(model: TrainedModel, objective: Objective[B], batch: B) -> StepLoss:
    """Return the objective's loss plus `aux_loss_coef` x the load-balancing loss, where the model has experts to
    balance: a mean over all tokens of the sequences that weigh anything."""
    forward = RecordingForward(model)
    loss = objective.loss(forward, batch)
    if forward.aux_loss is None:
        return loss
    tokens = count_tokens(batch)
    balance = forward.aux_loss * tokens
    metrics = {**loss.metrics, "aux_loss": Mean(balance.detach(), tokens)}
    return StepLoss({**loss.sums, ALL_TOKENS: model.config.aux_loss_coef * balance}, metrics)


def global_counts(objective: Objective[B], micro_batches: Sequence[B], world: World) -> dict[str, float]:
    """Return the number of each unit over all micro-batches of the step and all ranks. They are read at once: the
    micro-batches of some tasks are on the device already."""
    units = [count_units(objective, batch) for batch in micro_batches]
    names = sorted(units[0])
    local = torch.stack([torch.stack([unit[name] for name in names]).double() for unit in units]).sum(0)
    return dict(zip(names, world.sum(local).tolist(), strict=True))


def count_units(objective: Objective[B], batch: B) -> dict[str, torch.Tensor]:
    """Return the number of each unit in a batch."""
    return {**objective.units(batch), ALL_TOKENS: count_tokens(batch)}


def weigh_share(loss: StepLoss, counts: Mapping[str, float]) -> torch.Tensor:
    """Return the share of a micro-batch in the loss of the step: the sum over units of total / global count. Of a unit
    that the step has none of, the total is 0."""
    shares = [total / (counts[name] or 1.0) for name, total in loss.sums.items()]
    return torch.stack(shares).sum()


def add_metrics(into: dict[str, Metric], metrics: Mapping[str, Metric]) -> None:
    """Add a micro-batch's metrics to those of the step, in float64; a name need not be in every micro-batch."""
    for name, metric in metrics.items():
        into[name] = into[name] + metric.exact() if name in into else metric.exact()


def nonfinite(step: int, suspects: list[str]) -> RunError:
    """Return the error that ends a run at a step (0-based) that is not finite. `suspects` are all sequences of the
    micro-batches whose loss was not."""
    more = f" and {len(suspects) - NAMED} more" if len(suspects) > NAMED else ""
    where = f"The loss came from {', '.join(suspects[:NAMED])}{more}" if suspects else "All losses were finite"
    return RunError(
        f"step {step + 1}: the loss or its gradient is not finite; nothing was updated. {where}. "
        "Lower the learning rate (adam.lr), or set train.on_nonfinite=skip"
    )
