"""Ranks that split the tokens of a row compute the attention of one rank, and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rlhf_suite.errors import UserError
from rlhf_suite.models.attention import SequenceLayout, varlen_attention
from rlhf_suite.models.sequence_parallel import SequenceGroup

pytestmark = pytest.mark.stack
HEADS, PAIRS, SIZE = 4, 2, 8
LENGTHS = {
    "several sequences": [5, 9, 2, 16],
    "one token is missing to whole chunks": [7],
    "fewer tokens than chunks": [3],
    "sequences of one token": [1] * 8,
    "a sequence over all chunks, and a short one": [40, 3],
    "equal sequences": [6, 6, 6, 6],
}


def made(lengths, fill):
    """Query, key, value and the gradient of the output, [1, heads, T, D]; random after the row, up to `fill`."""
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = (HEADS, PAIRS, PAIRS, HEADS)
    states = [torch.randn(1, n, sum(lengths), SIZE, generator=generator, dtype=torch.float64) for n in shapes]
    return [torch.cat([each, torch.ones(1, each.shape[1], fill, SIZE).double()], 2) for each in states]


def attended(states, upstream, sequences, **settings):
    """The output [T, H * D] and the gradients of query, key and value, [T, heads * D] each."""
    inputs = [each.clone().requires_grad_() for each in states]
    output, _ = varlen_attention(nn.Module(), *inputs, None, sequences=sequences, **settings)
    (output.transpose(1, 2) * upstream).sum().backward()
    return [output[0].detach().flatten(1), *(each.grad[0].transpose(0, 1).flatten(1) for each in inputs)]


def largest_difference(world, mode, lengths, window=None):
    """The largest difference of this rank's outputs and gradients from those of the whole row."""
    group = SequenceGroup(dist.group.WORLD, world.rank, world.mesh.size, mode)
    sequences = SequenceLayout.of(torch.tensor(lengths), True, group)
    own, total = sequences.shard.tokens, sum(lengths)
    *states, upstream = made(lengths, len(sequences.positions) - total)
    upstream[:, :, total:] = 0
    *whole_states, whole_upstream = made(lengths, 0)
    layout = SequenceLayout.of(torch.tensor(lengths), True)
    wanted = attended(whole_states, whole_upstream, layout, sliding_window=window)
    found = attended([each[:, :, own] for each in states], upstream[:, :, own], sequences, sliding_window=window)
    real = own < total
    return max(
        float((mine[real] - right[own[real]]).abs().max()) if real.any() else 0.0
        for mine, right in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("mode", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_compute_the_attention_of_one(ranks, size, mode):
    for name, lengths in LENGTHS.items():
        assert max(ranks(size).call(largest_difference, mode, lengths)) < 1e-12, name


def test_ulysses_computes_sliding_windows(ranks):
    assert max(ranks(2).call(largest_difference, "ulysses", [30, 9], 4)) < 1e-12


def refusal(world, mode):
    try:
        largest_difference(world, mode, [30, 9], 4)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("mode", ["gather", "ring"])
def test_blocks_refuse_sliding_windows(ranks, mode):
    for said in ranks(2).call(refusal, mode):
        assert "sliding window of 4 tokens" in said and "ds.ring_attn_mode=ulysses" in said


def tokens_held(world):
    group = SequenceGroup(dist.group.WORLD, world.rank, world.mesh.size, "gather")
    return SequenceLayout.of(torch.tensor([9, 5]), True, group).shard.tokens.tolist()


def test_a_rank_has_an_early_and_a_late_chunk(ranks):
    assert ranks(2).call(tokens_held) == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]


class Heads:
    def __init__(self, query, pairs):
        self.num_attention_heads, self.num_key_value_heads = query, pairs


@pytest.mark.notices(
    "ulysses splits key/value heads over ranks that do not divide them",
    "models/families.py",
    "(pairs % size == 0 or size % pairs == 0)",
    "pairs <= heads",
)
@pytest.mark.parametrize(("heads", "fits"), [((8, 8), True), ((8, 2), True), ((8, 3), False), ((6, 2), False)])
def test_ulysses_needs_heads_for_every_rank(heads, fits):
    group = SequenceGroup(None, 0, 4, "ulysses")
    if fits:
        group.check_heads(Heads(*heads))
    else:
        with pytest.raises(UserError, match=r"cannot be split over ds\.ring_attn_size=4 ranks"):
            group.check_heads(Heads(*heads))
