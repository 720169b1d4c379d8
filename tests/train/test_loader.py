"""Which sequences a rank trains on: all of them once an epoch, whatever the ranks, as a pure function of the step."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch

from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.config.plan.micro_batches import MicroBatches
from rlhf_suite.data.batch import Example, Group
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.train.loader import StepLoader, micro_groups, rank_micro_batches

LENGTHS = [3, 9, 4, 12, 5, 2, 7, 30, 6, 8]
EXAMPLES = [Example(list(range(length)), [0] + [1] * (length - 1)) for length in LENGTHS]


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, Mesh(size), torch.device("cpu"))


def seen(loader: StepLoader, step: int) -> list[int]:
    trained_on = [batch for batch in loader.step(step) if batch.mask.any()]
    return [index for batch in trained_on for index in batch.index.tolist()]


@pytest.mark.notices(
    "one epoch is trained whatever the flag says",
    "train/loader.py",
    "self.order.steps_per_epoch * self.config.max_epochs",
    "self.order.steps_per_epoch",
)
@pytest.mark.notices("every rank has the rows of the first", "train/loader.py", "parts[world.data_index]", "parts[0]")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_epoch_trains_on_every_sequence_once(size, dynamic):
    config = TrainConfig.of(
        "sft",
        batch_size=4,
        micro_batch_size=2,
        dynamic_batch_enable=dynamic,
        max_tokens_per_gpu=32,
        max_epochs=2,
        seed=1,
    )
    loaders = [StepLoader(EXAMPLES, config, world(rank, size)) for rank in range(size)]
    assert {loader.total_steps for loader in loaders} == {6}
    for epoch in (0, 1):
        steps = [sorted(chain(*(seen(loader, 3 * epoch + i) for loader in loaders))) for i in range(3)]
        assert sorted(chain(*steps)) == list(range(10))
        assert [len(step) for step in steps] == [4, 4, 2]  # the last batch is short, and no row is dropped
        assert steps == [sorted(StepLoader(EXAMPLES, config, world()).order.indices(3 * epoch + i)) for i in range(3)]


def test_a_step_does_not_depend_on_the_steps_before():
    config = TrainConfig.of("sft", batch_size=4, micro_batch_size=2, seed=1)
    one, other = (StepLoader(EXAMPLES, config, world()) for _ in range(2))
    for step in range(4):
        one.step(step)
    assert seen(one, 4) == seen(other, 4)
    assert seen(one, 0) != seen(one, 3), "another shuffle in the next epoch"
    assert seen(one, 0) != seen(StepLoader(EXAMPLES, TrainConfig.of("sft", batch_size=4, seed=2), world()), 0)


def test_max_steps_shortens_but_never_lengthens():
    for max_steps, total in ((None, 6), (2, 2), (99, 6)):
        config = TrainConfig.of("sft", batch_size=4, max_epochs=2, max_steps=max_steps)
        assert StepLoader(EXAMPLES, config, world()).total_steps == total


def test_a_micro_batch_holds_its_sequences_with_their_masks():
    (batch, other) = rank_micro_batches(EXAMPLES, [7, 0, 5], TrainConfig.of("sft", micro_batch_size=2), world())
    assert batch.ids.tolist() == [*range(30), 0, 1, 2]
    assert batch.mask.tolist() == [0] + [1] * 29 + [0, 1, 1]
    assert batch.index.tolist() == [7, 0]
    assert (other.lengths.tolist(), other.index.tolist()) == ([2], [5])


def test_a_token_budget_bounds_every_micro_batch():
    config = TrainConfig.of("sft", dynamic_batch_enable=True, max_tokens_per_gpu=31)
    batches = rank_micro_batches(EXAMPLES, range(10), config, world())
    assert max(batch.num_tokens for batch in batches) <= 31
    assert len(batches) == 3  # 86 tokens


def test_a_row_longer_than_the_budget_is_trained_on_as_well():
    batches = rank_micro_batches(EXAMPLES, range(10), TrainConfig.of("sft", max_tokens_per_gpu=20), world())
    assert sorted(index for batch in batches for index in batch.index.tolist()) == [*range(10)]
    assert max(batch.num_tokens for batch in batches) == 30


def test_a_written_number_of_rows_leaves_no_budget_unless_both_are_asked_for():
    config = TrainConfig.of("sft", micro_batch_size=4, max_tokens_per_gpu=20)
    assert [len(batch.lengths) for batch in rank_micro_batches(EXAMPLES, range(10), config, world())] == [4, 4, 2]
    both = replace(config, dynamic_batch_enable=True)
    assert max(batch.num_tokens for batch in rank_micro_batches(EXAMPLES, range(10), both, world())) == 30


@pytest.mark.notices(
    "a pair counts its tokens and not its padding",
    "train/loader.py",
    "return len(lengths) * max(lengths)",
    "return sum(lengths)",
)
def test_padding_counts_in_the_budget_of_a_model_that_pads():
    pairs = [Group((one, other)) for one, other in zip(EXAMPLES[::2], EXAMPLES[1::2], strict=True)]
    for items, budget in ((EXAMPLES, 40), (pairs, 60)):
        config = TrainConfig.of("sft", max_tokens_per_gpu=budget)
        batches = rank_micro_batches(items, range(len(items)), config, world(), packed=False)
        assert sorted({index for batch in batches for index in batch.index.tolist()}) == [*range(len(items))]
        assert max(len(batch.lengths) * int(batch.lengths.max()) for batch in batches) <= budget


def test_ranks_get_about_the_same_number_of_tokens():
    tokens = [
        sum(
            batch.num_tokens for batch in rank_micro_batches(EXAMPLES, range(10), TrainConfig.of("sft"), world(rank, 2))
        )
        for rank in (0, 1)
    ]
    assert tokens == [43, 43]


def test_a_rank_without_sequences_gets_one_that_weighs_nothing():
    batches = [rank_micro_batches(EXAMPLES, [3], TrainConfig.of("sft"), world(rank, 2)) for rank in (0, 1)]
    masks = sorted(float(micro[0].mask.sum()) for micro in batches)
    assert masks == [0, 11]


def test_a_budget_of_tokens_is_that_of_each_rank_that_splits_them():
    found = [sorted(micro_groups([4, 4, 4, 4], MicroBatches(tokens=8), Mesh(1, sequence))) for sequence in (1, 2)]
    assert [len(groups) for groups in found] == [2, 1]
