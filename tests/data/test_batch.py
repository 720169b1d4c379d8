"""The token layout: sequences end to end, selected and joined without touching their order."""

from __future__ import annotations

import pickle

import pytest
import torch

from rlhf_suite.data.batch import Example, TokenBatch, collate, take

EXAMPLES = [
    Example([10, 11, 12], [0, 1, 1], "a:1", {"margin": 0.5}),
    Example([20], [0], "a:2", {"margin": 2}),
    Example([30, 31], [0, 1], "a:3", {"margin": -1.0}),
]


def equal(one: TokenBatch, other: TokenBatch) -> bool:
    same = torch.equal(one.ids, other.ids) and torch.equal(one.lengths, other.lengths)
    same = same and one.tokens.keys() == other.tokens.keys() and one.rows.keys() == other.rows.keys()
    same = same and all(torch.equal(one.tokens[name], other.tokens[name]) for name in one.tokens)
    return same and all(torch.equal(one.rows[name], other.rows[name]) for name in one.rows)


def test_collate_lays_sequences_end_to_end():
    batch = collate(EXAMPLES)
    assert batch.ids.tolist() == [10, 11, 12, 20, 30, 31] and batch.ids.dtype == torch.int64
    assert batch.lengths.tolist() == [3, 1, 2] and batch.lengths.dtype == torch.int64
    assert batch.tokens["mask"].tolist() == [0, 1, 1, 0, 0, 1] and batch.tokens["mask"].dtype == torch.float32
    assert batch.rows["margin"].tolist() == [0.5, 2, -1] and batch.rows["margin"].dtype == torch.float32
    assert len(batch) == 3 and batch.num_tokens == 6


def test_starts_and_segments_locate_each_token():
    batch = collate(EXAMPLES)
    assert batch.starts.tolist() == [0, 3, 4]
    assert batch.segments.tolist() == [0, 0, 0, 1, 2, 2]


def test_an_empty_batch_is_a_batch():
    batch = collate([])
    assert len(batch) == 0 and batch.num_tokens == 0 and batch.segments.tolist() == []


def test_take_selects_per_token_and_per_row_fields_in_the_given_order():
    chosen = take(collate(EXAMPLES), [2, 0, 2])
    assert equal(chosen, collate([EXAMPLES[2], EXAMPLES[0], EXAMPLES[2]]))


def test_take_tells_fields_apart_when_there_are_as_many_tokens_as_sequences():
    batch = TokenBatch(
        torch.tensor([1, 2]), torch.tensor([2, 0]), {"x": torch.tensor([5.0, 6.0])}, {"y": torch.tensor([7.0, 8.0])}
    )
    chosen = take(batch, [0])
    assert chosen.tokens["x"].tolist() == [5, 6] and chosen.rows["y"].tolist() == [7]


def test_take_of_nothing_is_an_empty_batch():
    assert equal(take(collate(EXAMPLES), []), take(collate(EXAMPLES[:1]), []))
    assert len(take(collate(EXAMPLES), [])) == 0


def test_fields_with_further_dimensions_travel_along():
    vectors = torch.arange(12.0).reshape(6, 2)
    batch = TokenBatch(torch.arange(6), torch.tensor([3, 1, 2]), {"vectors": vectors})
    assert torch.equal(take(batch, [2]).tokens["vectors"], vectors[4:])


@pytest.mark.parametrize("fields", [{"tokens": {"x": torch.zeros(2)}}, {"rows": {"x": torch.zeros(3)}}])
def test_a_field_of_the_wrong_size_is_refused(fields):
    with pytest.raises(AssertionError, match="'x'"):
        TokenBatch(torch.tensor([1, 2, 3]), torch.tensor([1, 2]), **fields)


def test_a_batch_pickles_and_moves():
    batch = collate(EXAMPLES)
    assert equal(pickle.loads(pickle.dumps(batch)), batch)
    moved = batch.to("meta")
    assert {moved.ids.device.type, moved.tokens["mask"].device.type, moved.rows["margin"].device.type} == {"meta"}
