"""Rotary positions without a GPU are the same for queries by head and by row."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops

from rlhf_suite.engines.cpu_kernels import join_heads

TOKENS, HEADS, SIZE = 6, 2, 32


def rotate(layer, positions, query, key=None):
    """The kernel as vLLM calls it."""
    angles = torch.arange(64)[:, None] / 1e4 ** (torch.arange(0, SIZE, 2) / SIZE)
    ops.rotary_embedding(positions, query, key, SIZE, torch.cat([angles.cos(), angles.sin()], -1), True)
    return query, key


@pytest.mark.skipif(not hasattr(torch.ops._C, "rotary_embedding"), reason="vLLM has no such kernel here")
@pytest.mark.parametrize("has_key", [True, False])
def test_heads_are_rotated_by_the_position_of_their_token(has_key):
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(TOKENS)
    query = torch.randn(TOKENS, HEADS, SIZE, generator=generator)
    key = torch.randn(TOKENS, 1, SIZE, generator=generator) if has_key else None
    rows = [tensor if tensor is None else tensor.clone().flatten(1) for tensor in (query, key)]
    expected = rotate(None, positions, *rows)
    rotated = join_heads(rotate)(None, positions, query.clone(), key if key is None else key.clone())
    for tensor, row in zip(rotated, expected, strict=True):
        assert (tensor is None and row is None) or torch.equal(tensor.flatten(1), row)
    assert rotated[0].shape == query.shape
