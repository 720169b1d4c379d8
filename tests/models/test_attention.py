"""The registered attention function: buckets, refusals, and the CUDA kernel against the padded one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_suite.errors import UserError
from rlhf_suite.models.attention import Sequences, _Call, _Place, varlen_attention


def states(total: int, heads: int = 4, kv_heads: int = 2, **kwargs) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, total, 16), (1, kv_heads, total, 16), (1, kv_heads, total, 16)]
    return [torch.randn(shape, generator=generator).to(**kwargs) for shape in shapes]


def test_positions_start_again_at_every_sequence():
    sequences = Sequences.of(torch.tensor([3, 1, 2]), packed=True)
    assert sequences.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert sequences.cu_lengths.tolist() == [0, 3, 4, 6] and sequences.cu_lengths.dtype == torch.int32
    assert sequences.slots.tolist() == [0, 1, 2, 3, 6, 7]


def test_one_long_sequence_does_not_pad_the_short_ones_to_its_length():
    sequences = Sequences.of(torch.tensor([1000] + [10] * 50), packed=True)
    assert sum(bucket.rows * bucket.width for bucket in sequences.buckets) == 1500


def test_buckets_hold_every_token_once_and_the_order_brings_them_back():
    lengths = torch.tensor([5, 200, 1, 65, 130, 9])
    sequences = Sequences.of(lengths, packed=True)
    tokens = torch.cat([bucket.tokens for bucket in sequences.buckets])
    assert len(sequences.buckets) == 3
    assert tokens[sequences.order].tolist() == list(range(int(lengths.sum())))


@pytest.mark.parametrize("lengths", [[4, 3], [4, 70]])
def test_placing_tokens_into_a_block_has_the_gradient_of_reading_them_back(lengths):
    bucket = Sequences.of(torch.tensor(lengths), packed=True).buckets[0]
    tokens = torch.randn(sum(lengths), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: _Place.apply(x, bucket)[bucket.slots], (tokens,))


def test_a_sequence_attends_to_itself_alone():
    query, key, value = states(8)
    sequences = Sequences.of(torch.tensor([5, 3]), packed=True)
    together, _ = varlen_attention(nn.Module(), query, key, value, None, sequences=sequences)
    other = value.clone()
    other[:, :, :5] += 1
    changed, _ = varlen_attention(nn.Module(), query, key, other, None, sequences=sequences)
    assert together.shape == (1, 8, 4, 16)
    torch.testing.assert_close(changed[:, 5:], together[:, 5:])
    assert (changed[:, :5] - together[:, :5]).abs().min() > 0.5


@pytest.mark.parametrize("argument", ["softcap", "s_aux", "position_bias"])
def test_scores_that_need_more_than_a_scale_are_refused(argument):
    query, key, value = states(4)
    sequences = Sequences.of(torch.tensor([4]), packed=True)
    with pytest.raises(UserError, match=argument):
        varlen_attention(nn.Module(), query, key, value, None, sequences=sequences, **{argument: 30.0})


def test_a_model_that_does_not_hand_the_borders_on_is_refused():
    query, key, value = states(4)
    with pytest.raises(UserError, match="sequence borders"):
        varlen_attention(nn.Module(), query, key, value, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 7])
def test_the_cuda_kernel_agrees_with_the_padded_blocks(window):
    lengths = torch.tensor([5, 70, 1, 130, 9], device="cuda")
    sequences = Sequences.of(lengths, packed=True)
    half = [s.requires_grad_() for s in states(int(lengths.sum()), device="cuda", dtype=torch.bfloat16)]
    full = [s.detach().float().requires_grad_() for s in half]
    results = []
    for inputs in (half, full):
        output, _ = varlen_attention(nn.Module(), *inputs, None, sequences=sequences, sliding_window=window)
        results.append((output, *torch.autograd.grad(output.float().square().sum(), inputs)))
    for kernel, padded in zip(*results, strict=True):
        torch.testing.assert_close(kernel.float(), padded, atol=3e-2, rtol=3e-2)


def test_the_window_counts_the_token_itself():
    query, key, value = states(6)
    call = _Call(scaling=None, window=1, dropout=0.0)
    repeated = value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(call.padded(query, key, value), repeated)
