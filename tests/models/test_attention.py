"""The registered attention function: borders, refusals, and the CUDA kernel against SDPA."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlhf_suite.errors import UserError
from rlhf_suite.models.attention import SequenceLayout, _Call, varlen_attention


def states(total: int, heads: int = 4, kv_heads: int = 2, **kwargs) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, total, 16), (1, kv_heads, total, 16), (1, kv_heads, total, 16)]
    return [torch.randn(shape, generator=generator).to(**kwargs) for shape in shapes]


def test_positions_start_again_at_every_sequence():
    sequences = SequenceLayout.of(torch.tensor([3, 1, 2]), packed=True)
    assert sequences.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert sequences.cu_lengths.tolist() == [0, 3, 4, 6] and sequences.cu_lengths.dtype == torch.int32
    assert sequences.slots.tolist() == [0, 1, 2, 3, 6, 7]


def test_neighbours_of_the_same_length_are_one_run():
    sequences = SequenceLayout.of(torch.tensor([7, 7, 3, 7]), packed=True)
    assert sequences.runs == ((2, 7), (1, 3), (1, 7))


def test_a_sequence_attends_to_itself_alone():
    query, key, value = states(8)
    sequences = SequenceLayout.of(torch.tensor([5, 3]), packed=True)
    together, _ = varlen_attention(nn.Module(), query, key, value, None, sequences=sequences)
    other = value.clone()
    other[:, :, :5] += 1
    changed, _ = varlen_attention(nn.Module(), query, key, other, None, sequences=sequences)
    assert together.shape == (1, 8, 4, 16)
    torch.testing.assert_close(changed[:, 5:], together[:, 5:])
    assert (changed[:, :5] - together[:, :5]).abs().min() > 0.5


@pytest.mark.parametrize("arguments", [("position_bias",), ("softcap", "s_aux")])
def test_scores_that_need_more_than_is_known_are_refused(arguments):
    query, key, value = states(4)
    sequences = SequenceLayout.of(torch.tensor([4]), packed=True)
    with pytest.raises(UserError, match=arguments[0]):
        varlen_attention(nn.Module(), query, key, value, None, sequences=sequences, **dict.fromkeys(arguments, 30.0))


@pytest.mark.notices(
    "a sink is outside of the window of late tokens",
    "models/attention.py",
    "            mask[:, 0] |= sees_first\n",
    "",
)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("cap", "with_sinks"), [(None, True), (2.0, False)])
def test_sinks_and_caps_are_those_of_the_formula(window, cap, with_sinks):
    compare_with_formula(window, cap, with_sinks, "cpu", torch.float64)


BACKENDS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]  # those with grouped queries


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("window", [None, 3])
def test_on_a_gpu_sinks_are_those_of_the_formula(window, backend):
    if window is not None and backend == SDPBackend.FLASH_ATTENTION:
        pytest.skip("torch's flash kernel takes no mask")
    with sdpa_kernel(backend):
        compare_with_formula(window, None, True, "cuda", torch.bfloat16, atol=4e-2, rtol=4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
def test_on_a_gpu_caps_are_those_of_the_formula(window):
    compare_with_formula(window, 2.0, False, "cuda", torch.bfloat16, atol=4e-2, rtol=4e-2)


def compare_with_formula(window, cap, with_sinks, device, dtype, **limits) -> None:
    """Compare outputs and gradients on a device with those of the formula in float64."""
    exact = [each.to(dtype).double().requires_grad_() for each in states(9)]
    if with_sinks:
        exact.append(torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True))
    leaves = [each.detach().to(device, dtype).requires_grad_() for each in exact]
    query, key, value, *rest = leaves
    sinks = rest[0] if rest else None
    outputs, wanted = [], []
    for packed in (True, False):
        sequences = SequenceLayout.of(torch.tensor([7, 2], device=device), packed=packed)
        inputs = (query, key, value) if packed else [each[:, :, :7] for each in (query, key, value)]
        settings = {"sequences": sequences, "softcap": cap, "s_aux": sinks, "sliding_window": window, "scaling": 0.3}
        output, _ = varlen_attention(nn.Module(), *inputs, None, **settings)
        outputs.append(output[0, :7])
        parts = (each[0, :, :7] for each in exact[:3])
        wanted.append(by_formula(*parts, cap, exact[3] if with_sinks else None, window))
    for output, formula in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output.double().cpu(), formula, **limits)
    found = torch.autograd.grad(outputs[0].double().square().sum(), leaves)
    expected = torch.autograd.grad(wanted[0].square().sum(), exact)
    for gradient, formula in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.double().cpu(), formula, **limits)


def by_formula(query, key, value, cap, sinks, window) -> torch.Tensor:
    """Attention [L, H, D] of one sequence, [H, L, D] and [K, L, D] each, with a scale of 0.3."""
    key, value = (each.repeat_interleave(2, 0) for each in (key, value))
    scores = 0.3 * query @ key.mT
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    distance = torch.arange(scores.shape[1])[:, None] - torch.arange(scores.shape[1])
    scores = scores.masked_fill((distance < 0) | (distance >= (window or 99)), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    return (scores.softmax(-1)[..., : value.shape[1]] @ value).transpose(0, 1)


def test_a_model_that_does_not_pass_the_borders_on_is_refused():
    query, key, value = states(4)
    with pytest.raises(UserError, match="sequence borders"):
        varlen_attention(nn.Module(), query, key, value, None)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7])
def test_the_cuda_kernel_agrees_with_sdpa(window):
    lengths = torch.tensor([5, 70, 1, 130, 9], device="cuda")
    sequences = SequenceLayout.of(lengths, packed=True)
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
    torch.testing.assert_close(call.attend_padded(query, key, value), repeated)
