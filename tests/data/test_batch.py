"""The token layout: sequences end to end, selected and joined without touching their order."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

import pytest
import torch

from rlhf_suite.data.batch import Example, PerRow, PerToken, TokenBatch, collate, require_column, take, weightless

EXAMPLES = [
    Example([10, 11, 12], [0, 1, 1], "a:1", {"margin": 0.5}),
    Example([20], [0], "a:2", {"margin": 2}),
    Example([30, 31], [0, 1], "a:3", {"margin": -1.0}),
]


@dataclass(frozen=True)
class Margins(TokenBatch):
    """A batch with a column of each kind beside those of every batch."""

    vectors: PerToken = None  # [T, 2]
    margin: PerRow = None  # [B]


def batch_of(examples: list[Example]) -> Margins:
    return collate(examples, Margins)


def equal(one: TokenBatch, other: TokenBatch) -> bool:
    same = torch.equal(one.ids, other.ids) and torch.equal(one.lengths, other.lengths)
    for unit in ("token", "row"):
        mine, others = one.columns(unit), other.columns(unit)
        same = same and mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)
    return same


def test_collate_lays_sequences_end_to_end():
    batch = batch_of(EXAMPLES)
    assert batch.ids.tolist() == [10, 11, 12, 20, 30, 31] and batch.ids.dtype == torch.int64
    assert batch.lengths.tolist() == [3, 1, 2] and batch.lengths.dtype == torch.int64
    assert batch.mask.tolist() == [0, 1, 1, 0, 0, 1] and batch.mask.dtype == torch.float32
    assert batch.margin.tolist() == [0.5, 2, -1] and batch.margin.dtype == torch.float32
    assert len(batch) == 3 and batch.num_tokens == 6


def test_starts_and_segments_locate_each_token():
    batch = batch_of(EXAMPLES)
    assert batch.starts.tolist() == [0, 3, 4]
    assert batch.segments.tolist() == [0, 0, 0, 1, 2, 2]


def test_an_empty_batch_is_a_batch():
    batch = batch_of([])
    assert len(batch) == 0 and batch.num_tokens == 0 and batch.segments.tolist() == []


def test_take_selects_per_token_and_per_row_fields_in_the_given_order():
    chosen = take(batch_of(EXAMPLES), [2, 0, 2])
    assert equal(chosen, batch_of([EXAMPLES[2], EXAMPLES[0], EXAMPLES[2]]))


def test_take_tells_fields_apart_when_there_are_as_many_tokens_as_sequences():
    batch = TokenBatch(torch.tensor([1, 2]), torch.tensor([2, 0]), torch.tensor([0.0, 1.0]), torch.tensor([7, 8]))
    chosen = take(batch, [0])
    assert chosen.mask.tolist() == [0, 1] and chosen.index.tolist() == [7]


def test_take_of_nothing_is_an_empty_batch():
    assert equal(take(batch_of(EXAMPLES), []), take(batch_of(EXAMPLES[:1]), []))
    assert len(take(batch_of(EXAMPLES), [])) == 0


def test_fields_with_further_dimensions_travel_along():
    vectors = torch.arange(12.0).reshape(6, 2)
    batch = Margins(torch.arange(6), torch.tensor([3, 1, 2]), torch.ones(6), vectors=vectors)
    assert torch.equal(take(batch, [2]).vectors, vectors[4:])


@pytest.mark.parametrize(("name", "size"), [("vectors", 2), ("margin", 3)])
def test_a_column_of_the_wrong_size_is_refused(name, size):
    with pytest.raises(AssertionError, match=f"{name} has {size} entries"):
        Margins(torch.tensor([1, 2, 3]), torch.tensor([1, 2]), torch.ones(3), **{name: torch.zeros(size)})


def test_a_column_that_is_needed_and_missing_is_named():
    batch = batch_of(EXAMPLES)
    assert torch.equal(require_column(batch.margin, "margin"), torch.tensor([0.5, 2, -1]))
    with pytest.raises(AssertionError, match="no column 'vectors'"):
        require_column(batch.vectors, "vectors")


def test_a_weightless_batch_keeps_everything_but_its_mask():
    batch = batch_of(EXAMPLES)
    assert equal(replace(weightless(batch), mask=batch.mask), batch) and not weightless(batch).mask.any()
    assert batch.mask.any(), "the batch itself keeps its mask"


def test_a_batch_pickles_and_moves():
    batch = batch_of(EXAMPLES)
    assert equal(pickle.loads(pickle.dumps(batch)), batch)
    moved = batch.to("meta")
    assert {moved.ids.device.type, moved.mask.device.type, moved.margin.device.type} == {"meta"}


@pytest.mark.notices(
    "batches from Ray's store cannot be written to",
    "data/batch.py",
    "torch.from_numpy(value.copy())",
    "torch.from_numpy(value)",
)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_batch_crosses_processes_as_arrays_beside_the_pickle_and_owns_its_memory_there():
    batch = TokenBatch(torch.arange(3000), torch.tensor([1000, 2000]), torch.ones(3000), torch.tensor([4, 5]))
    buffers: list[pickle.PickleBuffer] = []
    packed = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(packed) < 2000 and sum(len(each.raw()) for each in buffers) >= 3000 * (8 + 4)
    read_only = [memoryview(bytes(each.raw())) for each in buffers]
    found = pickle.loads(packed, buffers=read_only)
    found.ids[0] = 7
    assert [bytes(each) for each in read_only] == [bytes(each.raw()) for each in buffers]
    assert found.ids[1:].equal(batch.ids[1:]) and found.mask.equal(batch.mask) and found.index.equal(batch.index)
    assert found.lengths.equal(batch.lengths) and found.images is None
