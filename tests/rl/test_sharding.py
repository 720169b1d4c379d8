"""What is split over ranks and micro-batches comes back in the order it had."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch

from memory import peak_bytes
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.rl.sharding import (
    Division,
    ForwardBatch,
    balanced_parts,
    in_micro_batches,
    shards,
    split,
)


@pytest.fixture
def batch() -> TokenBatch:
    lengths = torch.tensor([3, 1, 4, 2, 5])
    ids = torch.arange(15)
    return TokenBatch(ids, lengths, torch.ones(15), torch.arange(5))


@pytest.mark.notices(
    "a part of the sequences comes back in another order",
    "rl/sharding.py",
    "torch.cat(own)[self.rows]",
    "torch.cat(own)",
)
@pytest.mark.notices(
    "the numbers of the tokens come back in another order than they were sent",
    "rl/sharding.py",
    "for row in part:",
    "for row in sorted(part):",
)
@pytest.mark.parametrize("parts", [[[4, 0], [1, 3, 2]], [[0, 1, 2, 3, 4]], [[2], [], [4, 3, 1, 0]]])
def test_results_come_back_in_order(batch, parts):
    pieces, division = shards(batch, parts), Division(batch.lengths, parts)
    assert division.per_token([10 * piece.ids for piece in pieces]).tolist() == (10 * batch.ids).tolist()
    assert division.per_row([piece.index for piece in pieces]).tolist() == list(range(5))


def test_models_with_as_many_ranks_get_the_same_shards_without_columns_of_others(batch):
    experience = Experience(batch.ids, batch.lengths, batch.mask, batch.index, old_log_probs=torch.zeros(15))
    forward = ForwardBatch(experience)
    division, pieces = forward.over(2)
    assert forward.over(2)[1] is pieces and forward.over(2)[0] is division
    assert {tuple(piece.columns("token")) for piece in pieces} == {("mask",)}
    assert division.per_token([piece.ids for piece in pieces]).tolist() == batch.ids.tolist()
    (whole,) = forward.over(1)[1]
    assert whole.ids is batch.ids, "one rank gets no copy"


def test_an_empty_part_is_a_sequence_that_weighs_nothing(batch):
    full, empty = shards(batch, [[0, 1, 2, 3, 4], []])
    assert float(full.mask.sum()) == 15
    assert (len(empty), float(empty.mask.sum())) == (1, 0)
    assert float(batch.mask.sum()) == 15, "the batch itself keeps its mask"


def test_a_single_part_with_everything_is_the_batch_itself(batch):
    """A run with one rank per model copies no rollout."""
    assert shards(batch, balanced_parts(batch, 1))[0] is batch
    assert shards(batch, [[1, 0, 2, 3, 4]])[0].lengths.tolist() == [1, 3, 4, 2, 5]


def test_ranks_take_no_more_memory_than_their_tokens():
    """A row far longer than the others, and 400 short ones, on 8 ranks."""
    lengths = torch.tensor([200_000, *[5] * 400])
    batch = TokenBatch(torch.arange(int(lengths.sum())), lengths, torch.ones(int(lengths.sum())))
    steps = [range(200), range(200, 401)]
    assert peak_bytes(lambda: split(batch, steps, 8)) < 2.5 * (batch.ids.nbytes + batch.mask.nbytes)


def test_parts_are_balanced_by_tokens(batch):
    parts = balanced_parts(batch, 2)
    assert sorted(chain(*parts)) == list(range(5))
    assert sorted(int(batch.lengths[part].sum()) for part in parts) == [7, 8]
    assert balanced_parts(batch, 1) == [[0, 1, 2, 3, 4]]


def test_a_rank_that_has_run_out_keeps_up_with_the_others(batch):
    calls = []

    def forward(part: TokenBatch) -> torch.Tensor:
        calls.append(part.index.tolist())
        return part.ids.float()

    results = in_micro_batches(batch, [[0, 1], [2, 3, 4]], 4, forward)
    assert calls == [[0, 1], [2, 3, 4], [2, 3, 4], [2, 3, 4]]
    assert [result.tolist() for result in results] == [[0, 1, 2, 3], list(range(4, 15))]


@pytest.mark.notices(
    "the reference takes the routes of the policy",
    "rl/sharding.py",
    "if key[1] else self.tokens",
    "if self.routes is not None else self.tokens",
)
def test_only_who_asks_gets_routes_in_the_order_of_its_sequences(batch):
    routes = torch.arange(15, dtype=torch.int8)[:, None, None].expand(15, 2, 2)
    sent = ForwardBatch(replace(batch, routes=routes))
    for ranks in (1, 2):
        division, plain = sent.over(ranks)
        assert all(shard.routes is None for shard in plain)
        routed = sent.over(ranks, routed=True)[1]
        assert torch.equal(division.per_token([shard.routes for shard in routed]), routes)
