"""ds.overlap_comm: the reduction of the gradients is part of the backward pass, and changes no number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from steps import Setup, build, one_step, same, train

from rlhf_suite.config.plan import zero

pytestmark = pytest.mark.stack
OVERLAPS = [
    Setup(1),
    Setup(1, "bf16", accumulate="bf16"),
    Setup(1, "bf16", offload=True),
    Setup(2),
    Setup(2, "bf16"),
    Setup(3),
]


@pytest.mark.parametrize("setup", OVERLAPS, ids=str)
def test_steps_are_those_without_it(ranks, folder, batch, setup):
    """Several micro-batches on each of two ranks, and steps that begin with the gradients of none."""
    plain, overlapped = (
        ranks(2).call(train, folder, replace(setup, overlap=overlap), [batch] * 3)[0] for overlap in (False, True)
    )
    for row, right in zip(overlapped.metrics, plain.metrics, strict=True):
        assert row == pytest.approx(right, rel=1e-5 if setup.dtype == "fp32" else 2e-2)
    for name, value in plain.weights.items():
        tolerance = 1e-5 if setup.dtype == "fp32" else 3e-2
        torch.testing.assert_close(overlapped.weights[name], value, rtol=0, atol=tolerance, msg=name)


def train_by_defaults_of_gpus(world, folder, setup, batches):
    """Train on this CPU with the reductions that are the default on GPUs."""
    before, zero.FAST_DEVICES = zero.FAST_DEVICES, ("cpu",)
    try:
        model = build(world, folder, setup)
        is_default = model.engine.config["zero_optimization"]["overlap_comm"]
        return is_default, train(world, folder, setup, batches)
    finally:
        zero.FAST_DEVICES = before


@pytest.mark.parametrize("setup", [Setup(2, "bf16"), Setup(3), Setup(3, "bf16")], ids=str)
def test_steps_by_the_defaults_of_gpus_are_those_of_the_cpu(ranks, folder, batch, setup):
    """ZeRO-3 scatters the gradients then: each rank gets its part alone."""
    plain = ranks(2).call(train, folder, setup, [batch] * 3)[0]
    is_default, fast = ranks(2).call(train_by_defaults_of_gpus, folder, replace(setup, overlap=None), [batch] * 3)[0]
    assert is_default
    for row, right in zip(fast.metrics, plain.metrics, strict=True):
        assert row == pytest.approx(right, rel=1e-5 if setup.dtype == "fp32" else 2e-2)
    for name, value in plain.weights.items():
        tolerance = 1e-5 if setup.dtype == "fp32" else 3e-2
        torch.testing.assert_close(fast.weights[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_parameters_that_stay_whole_change_no_number(ranks, folder, batch, dtype):
    """ZeRO-3 gathers them after each step, and not for each pass; matrices are divided."""
    apart, whole = (ranks(2).call(train, folder, Setup(3, dtype, whole=most), [batch] * 3)[0] for most in (None, 500))
    assert same(whole.weights, apart.weights)
    assert whole.metrics == apart.metrics


def reduced_after_each_backward(world, folder, batch, setup):
    """Whether gradients had been reduced when each backward pass of a step had ended."""
    model, found = build(world, folder, setup), []
    backward = model.backward

    def watched(loss, *, last):
        backward(loss, last=last)
        found.append(any(model.optimizer.averaged_gradients.values()))

    model.backward = watched
    one_step(model, batch, 0, setup)
    return found


@pytest.mark.notices(
    "gradients are reduced after every micro-batch", "train/step.py", "last=number == len(micro_batches)", "last=True"
)
@pytest.mark.parametrize("overlap", [False, True])
def test_zero_1_reduces_in_the_last_backward_pass_if_told_to_overlap(ranks, folder, batch, overlap):
    for found in ranks(2).call(reduced_after_each_backward, folder, batch, Setup(1, overlap=overlap)):
        assert len(found) > 1
        assert found == [False] * (len(found) - 1) + [overlap]
