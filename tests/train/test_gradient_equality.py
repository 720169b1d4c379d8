"""One batch has one gradient, whatever splits it up; and the comparison sees each classic mistake of splitting.

Every loss and every split once; `python benchmarks/gradient_equality.py` computes all pairs.
"""

from __future__ import annotations

from dataclasses import replace

import gradients
import pytest
import torch
from gradients import gradient, reference
from plain_models import relative_error
from policy_formulas import CLIP, DUAL_CLIP, OBJECTIVES, TEMPERATURE
from splits import SEQUENCE_SPLITS, SPLITS, TENSOR_SPLITS, Split, sampled

from rlhf_suite.data.batch import take
from rlhf_suite.data.packing import balance
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.train import step, tensor_parallel
from rlhf_suite.train.strategy import TrainedModel

pytestmark = pytest.mark.stack  # the tests without ranks too: they need the same models
LIMIT = 1e-5  # of fp32 against float64
SAME_ORDER_LIMIT = 1e-6  # of fp32 against fp32, when the same numbers are added in the same order


@pytest.fixture(scope="module")
def wanted(folder, batch):
    """The reference gradient of a loss, over the rows of a split."""
    known = {}

    def get(loss: str, split: Split):
        key = (loss, split.lora, split.rows)
        if key not in known:
            known[key] = reference(folder, loss, take(batch, split.chosen(len(batch))), split.lora)
        return known[key]

    return get


@pytest.mark.notices(
    "each micro-batch is divided by its own count",
    "train/step.py",
    "    counts = global_counts(objective, micro_batches, world)",
    "    counts = global_counts(objective, micro_batches[:1], world)",
    cases="micro",
)
@pytest.mark.notices(
    "each rank divides by its own count",
    "train/step.py",
    "zip(names, world.sum(local).tolist(), strict=True)",
    "zip(names, local.tolist(), strict=True)",
    cases="ranks",
)
@pytest.mark.notices(
    "gradients are averaged over ranks, not added",
    "train/strategy.py",
    "self.engine.backward(loss * self.world.mesh.replicas)",
    "self.engine.backward(loss)",
    cases="ranks",
)
@pytest.mark.notices(
    "batches that fill a rank up weigh something",
    "data/batch.py",
    "mask=torch.zeros_like(batch.mask)",
    "mask=batch.mask",
    cases="ranks",
)
@pytest.mark.notices(
    "old log-probs are those of the moving policy",
    "rl/objectives.py",
    "old_log_probs=log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs",
    "old_log_probs=log_probs.detach()",
    cases="ppo",
)
@pytest.mark.parametrize(
    ("loss", "split"),
    [
        *(pair for splits in (SPLITS, SEQUENCE_SPLITS) for pair in sampled(list(OBJECTIVES), splits)),
        *(
            pytest.param(loss, split, marks=[pytest.mark.proof] if split.ranks == 4 else [])
            for loss, split in sampled(list(OBJECTIVES), TENSOR_SPLITS)
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_gradient_is_that_of_the_formula(ranks, folder, batch, wanted, loss, split):
    group = ranks(split.ranks, split.tensor)
    found = group.call(gradient, folder, loss, split, take(batch, split.chosen(len(batch))))[0]
    assert relative_error(found, wanted(loss, split)) <= LIMIT


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_changes_no_number_on_one_rank(ranks, folder, batch, stage):
    for loss in OBJECTIVES:
        plain, partitioned = (
            ranks(1).call(gradient, folder, loss, Split("", zero=zero), batch)[0] for zero in (0, stage)
        )
        assert relative_error(partitioned, plain) <= SAME_ORDER_LIMIT, loss


def test_the_batch_has_what_the_comparison_is_about(batch):
    """Gaps in masks, a sequence without masked tokens, ratios inside and outside both clips, ranks that differ."""
    chosen = batch.mask.bool()
    per_row = torch.zeros(len(batch)).index_add_(0, batch.segments, batch.mask)
    assert (per_row == 0).nonzero().flatten().tolist() == [gradients.UNMASKED]
    assert any(
        (mask := batch.mask[batch.segments == row]).diff().abs().sum() > 2 and mask[0] == 0 for row in range(len(batch))
    )
    parts = balance(batch.lengths.tolist(), 2)
    assert -(-len(parts[0]) // 2) != -(-len(parts[1]) // 2)  # micro-batches of 2: another number on each rank
    assert chosen.sum() > 100


def test_all_branches_of_the_losses_are_taken(folder, batch):
    ratios, advantages = [], []
    for sequence in gradients.read_alone(folder, batch, TEMPERATURE):
        masked = sequence.mask.bool()
        ratios.append(torch.exp(sequence.log_probs - sequence.old_log_probs)[masked])
        advantages.append(sequence.advantages[masked])
    ratio, advantage = torch.cat(ratios), torch.cat(advantages)
    low, high = CLIP
    assert ((ratio > 1 + high) & (advantage > 0)).sum() > 5
    assert ((ratio < 1 - low) & (advantage < 0)).sum() > 5
    assert ((ratio > DUAL_CLIP) & (advantage < 0)).sum() > 5
    assert ((ratio > 1 - low) & (ratio < 1 + high)).sum() > 20


# Mistakes, made on purpose. Each runs on the ranks that are to show it.


def without_mask(world, *args):
    *rest, batch = args
    everything = torch.ones_like(batch.mask).index_fill(0, batch.starts, 0.0)
    return gradient(world, *rest, replace(batch, mask=everything))


def divided_by_the_local_count(world, *args):
    right = step.global_counts
    step.global_counts = lambda objective, batches, _: right(objective, batches, World(0, Mesh(1), world.device))
    try:
        return gradient(world, *args)
    finally:
        step.global_counts = right


def divided_by_the_micro_batch_count(world, *args):
    right = step.weigh_share
    step.weigh_share = lambda loss, _: torch.stack(
        [total / max(1.0, float(next(iter(loss.metrics.values())).count)) for total in loss.sums.values()]
    ).sum()
    try:
        return gradient(world, *args)
    finally:
        step.weigh_share = right


def unscaled_by_the_number_of_ranks(world, *args):
    right = TrainedModel.backward
    TrainedModel.backward = lambda self, loss, last: self.engine.backward(loss)
    try:
        return gradient(world, *args)
    finally:
        TrainedModel.backward = right


def with_fill_in_batches_that_weigh(world, *args):
    right = step.weightless
    step.weightless = lambda batch: batch
    try:
        return gradient(world, *args)
    finally:
        step.weightless = right


def scaled_by_all_ranks(world, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "replicas", Mesh.size)
        return gradient(world, *args)


def with_gradients_of_norms_as_they_are(world, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "check_plan", lambda config, size: config.base_model_tp_plan)
        patch.setattr(tensor_parallel, "SUMMED", "nothing")
        return gradient(world, *args)


TWO = Split("2 ranks", ranks=2, zero=2, micro=2)
SPLIT_LAYERS = Split("tensor 2", ranks=2, tensor=2)
MISTAKES = [
    (without_mask, Split("1 rank")),
    (divided_by_the_micro_batch_count, Split("1 rank")),
    (divided_by_the_local_count, TWO),
    (unscaled_by_the_number_of_ranks, TWO),
    (with_fill_in_batches_that_weigh, TWO),
    (scaled_by_all_ranks, SPLIT_LAYERS),
    (with_gradients_of_norms_as_they_are, SPLIT_LAYERS),
]


@pytest.mark.parametrize(("mistake", "split"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_comparison_sees(ranks, folder, batch, wanted, mistake, split):
    for loss in ("next token", "value"):
        found = ranks(split.ranks, split.tensor).call(mistake, folder, loss, split, batch)[0]
        assert relative_error(found, wanted(loss, split)) > 100 * LIMIT, loss
