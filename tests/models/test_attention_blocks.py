"""Blocks of attention, added up, are attention over all of their keys: outputs and gradients, by the kernels of a CPU
and of a GPU."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.models.attention_blocks import Attended, Block, States

HEADS, PAIRS, SIZE, SCALE = 4, 2, 32, 0.2
PIECES = (40, 40, 7)  # causal, each by itself
EARLIER = 65  # keys that all queries see
ON = [
    ("cpu", torch.float64, 1e-9),
    pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, 4e-3, marks=pytest.mark.gpu),
]


def states(heads: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(heads, tokens, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention [H, q, D] of all queries to the earlier keys and to those before them in their own piece."""
    key, value = (each.repeat_interleave(HEADS // PAIRS, 0) for each in (key, value))
    piece = torch.repeat_interleave(torch.arange(len(PIECES)), torch.tensor(PIECES))
    place = torch.arange(sum(PIECES))
    own = (piece[:, None] == piece) & (place[:, None] >= place)
    seen = torch.cat([torch.ones(len(place), EARLIER, dtype=torch.bool), own], 1)
    scores = (SCALE * query @ key.mT).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu().double() - wanted).norm() / wanted.norm())


@pytest.mark.notices(
    "a block weighs by its own scores alone when it is merged",
    "models/attention_blocks.py",
    "both = torch.logaddexp(self.normaliser, other.normaliser)",
    "both = self.normaliser",
)
@pytest.mark.parametrize(("device", "dtype", "limit"), ON, ids=str)
def test_two_blocks_are_attention_over_all_of_their_keys(device, dtype, limit):
    queries, keys = sum(PIECES), EARLIER + sum(PIECES)
    exact = [states(HEADS, queries, 1), states(PAIRS, keys, 2), states(PAIRS, keys, 3)]
    weights = states(HEADS, queries, 4)
    leaves = [each.clone().requires_grad_() for each in exact]
    wanted = by_formula(*leaves)
    gradients = torch.autograd.grad((wanted * weights).sum(), leaves)

    query, key, value = (each.to(device, dtype) for each in exact)
    everyone, on = slice(0, queries), torch.device(device)
    blocks = [
        Block(everyone, slice(0, EARLIER), on),
        Block(everyone, slice(EARLIER, keys), on, PIECES),
    ]
    parts = [States(query, key[:, block.keys], value[:, block.keys]) for block in blocks]
    first, second = (block.forward(part, SCALE) for block, part in zip(blocks, parts, strict=True))
    whole = first.merge(second)
    assert relative_error(whole.output, wanted.detach()) < limit
    rounded = Attended(whole.output.to(dtype), whole.normaliser)
    found = [
        block.backward(weights.to(device, dtype), part, rounded, SCALE)
        for block, part in zip(blocks, parts, strict=True)
    ]
    assert relative_error(found[0].query + found[1].query, gradients[0]) < limit
    for name, gradient in (("key", gradients[1]), ("value", gradients[2])):
        joined = torch.cat([getattr(each, name) for each in found], 1)
        assert relative_error(joined, gradient) < limit, name
