"""The trial of a package's attention kernel: a kernel is believed only where its output and its gradients are right."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf_suite.models.attention import SequenceLayout, varlen_attention
from rlhf_suite.models.flash import LARGEST_ERROR, PARTS, FlashCall, Shape, attend_and_select, attend_ends, compare
from rlhf_suite.models.prefixes import SharedPrefixes

SHAPE = Shape(heads=4, key_heads=2, size=16, dtype=torch.float32, has_window=False, trains=True)


def attend_exactly(states: list[Tensor], call: FlashCall) -> Tensor:
    """Attention by the packed way of the suite, which is held against formulas elsewhere."""
    layout = SequenceLayout.of(call.borders.diff().long(), packed=True)
    if call.ends is not None:  # the keys are there already
        lengths, counts = call.borders.diff().tolist(), call.ends.borders.diff().tolist()
        runs = tuple((1, *pair) for pair in zip(counts, lengths, strict=True))
        places = torch.arange(len(states[1]))
        layout = replace(layout, prefixes=SharedPrefixes(places, places, call.ends.borders, call.ends.longest, runs))
    rows = [tokens.transpose(0, 1)[None] for tokens in states]
    settings = {"sequences": layout, "sliding_window": call.window, "scaling": call.scaling}
    return varlen_attention(nn.Module(), *rows, None, **settings)[0][0]


class WrongGradient(torch.autograd.Function):
    """A right output with a gradient that belongs to another token."""

    @staticmethod
    def forward(_, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_, gradient: Tensor) -> Tensor:
        return gradient.roll(1, 0)


def attend_with_wrong_gradients(states: list[Tensor], call: FlashCall) -> Tensor:
    return attend_exactly([states[0], WrongGradient.apply(states[1]), states[2]], call)


def attend_over_borders(states: list[Tensor], call: FlashCall) -> Tensor:
    borders = torch.tensor([0, call.borders[-1]], dtype=torch.int32)
    return attend_exactly(states, FlashCall(borders, int(borders[-1]), call.scaling, call.window, call.dropout))


def errors_of(kernel, shape: Shape = SHAPE) -> dict[str, float]:
    return dict(zip(PARTS, compare(kernel, attend_exactly, shape, torch.device("cpu")), strict=False))


def test_a_kernel_that_is_right_has_no_errors():
    assert max(errors_of(attend_exactly).values()) < 1e-6


def test_a_wrong_gradient_is_noticed_behind_a_right_output():
    errors = errors_of(attend_with_wrong_gradients)
    assert errors["output"] < 1e-6 and errors["gradient of queries"] < 1e-6
    assert errors["gradient of keys"] > LARGEST_ERROR


def test_a_kernel_that_looks_over_borders_is_noticed():
    assert errors_of(attend_over_borders)["output"] > LARGEST_ERROR


def test_a_window_that_is_ignored_is_noticed():
    def ignore_window(states: list[Tensor], call: FlashCall) -> Tensor:
        return attend_exactly(states, FlashCall(call.borders, call.longest, call.scaling, None, call.dropout))

    shape = Shape(heads=4, key_heads=2, size=16, dtype=torch.float32, has_window=True, trains=True)
    assert errors_of(ignore_window, shape)["output"] > LARGEST_ERROR
    assert max(errors_of(attend_exactly, shape).values()) < 1e-6


@pytest.mark.parametrize("has_window", [False, True])
def test_ends_of_sequences_are_what_they_are_in_whole_ones(has_window):
    shape = replace(SHAPE, has_window=has_window)
    errors = compare(
        partial(attend_ends, attend_exactly), partial(attend_and_select, attend_exactly), shape, torch.device("cpu")
    )
    assert len(errors) == len(PARTS) and max(errors) < 1e-6


def test_a_kernel_that_aligns_ends_with_the_first_keys_is_noticed():
    def attend_first(states: list[Tensor], call: FlashCall) -> Tensor:
        """The queries of ends at the places of the first tokens, as SDPA has them."""
        if call.ends is None:
            return attend_exactly(states, call)
        outputs = []
        for end, count, last in zip(call.borders[1:], call.borders.diff(), call.ends.borders[1:], strict=True):
            rows = [part[end - count : end].transpose(0, 1) for part in states[1:]]
            query = states[0][last - call.ends.borders.diff()[len(outputs)] : last].transpose(0, 1)
            output = F.scaled_dot_product_attention(query, *rows, is_causal=True, enable_gqa=True)
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)

    shape = replace(SHAPE, trains=False)
    errors = compare(
        partial(attend_ends, attend_first), partial(attend_and_select, attend_first), shape, torch.device("cpu")
    )
    assert errors[0] > LARGEST_ERROR


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_surrounding_pass_does_not_matter(context):
    with context():
        assert errors_of(attend_with_wrong_gradients)["gradient of keys"] > LARGEST_ERROR


def test_the_trial_takes_part_in_no_checkpoint_and_draws_no_random_numbers():
    tried = []

    def layer(states: Tensor) -> Tensor:
        if not tried:
            tried.append(errors_of(attend_exactly))
        return (states * torch.rand(3)).sum()

    states, results = torch.ones(3, requires_grad=True), []
    for _ in range(2):
        torch.manual_seed(0)
        total = checkpoint(layer, states, use_reentrant=False)
        results.append(torch.autograd.grad(total, states)[0])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert max(tried[0].values()) < 1e-6


def test_a_shape_that_does_not_train_has_its_output_compared():
    shape = Shape(heads=4, key_heads=2, size=16, dtype=torch.float32, has_window=False, trains=False)
    assert list(errors_of(attend_exactly, shape)) == ["output"]
