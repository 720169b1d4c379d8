"""A model whose weights are kept in host memory computes what it computes on the device. They go there once for all
forward passes of a phase."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.models.forward import sequence_scores, token_log_probs
from rlhf_suite.models.host_weights import keep_on_host, on_device

CPU = torch.device("cpu")


def addresses(model) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.notices(
    "the weights of a frozen model stay on the device",
    "models/host_weights.py",
    "            self._put_back()\n",
    "            pass\n",
)
@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_weights_of_the_host_are_on_the_device_within_the_block_alone(load, batch, family):
    model = load(family).requires_grad_(False)
    expected = token_log_probs(model, batch).log_probs
    kept = keep_on_host(model, CPU)
    before = addresses(model)
    for _ in range(2):
        with on_device(model):
            assert not {*addresses(model)} & {*before}
            for _ in range(3):
                torch.testing.assert_close(token_log_probs(model, batch).log_probs, expected, rtol=0, atol=0)
        assert addresses(model) == before
    assert kept.moves == 2, "once for three forward passes"


@pytest.mark.notices(
    "the end of an inner block takes the weights from the device of an outer one",
    "models/host_weights.py",
    "        if self.are_on_device:\n",
    "        if False:\n",
)
@torch.no_grad()
def test_weights_stay_on_the_device_until_the_outermost_block_ends(load, batch):
    """An evaluation prepares its batches, for which it brings the frozen models, while their losses read them."""
    model = load().requires_grad_(False)
    kept = keep_on_host(model, CPU)
    before = addresses(model)
    with on_device(model):
        there = addresses(model)
        with on_device(model):
            assert addresses(model) == there
        assert addresses(model) == there and not {*there} & {*before}
    assert addresses(model) == before and kept.moves == 1
    with pytest.raises(ZeroDivisionError), on_device(model):
        raise ZeroDivisionError
    with on_device(model):
        assert not {*addresses(model)} & {*before}


@torch.no_grad()
def test_a_reward_model_of_the_host_scores_the_same(load, batch):
    model = load(head="value").requires_grad_(False)
    expected = sequence_scores(model, batch)
    keep_on_host(model, CPU)
    with on_device(model):
        torch.testing.assert_close(sequence_scores(model, batch), expected, rtol=0, atol=0)


def test_a_model_without_weights_of_the_host_stays_where_it_is(load):
    model = load()
    before = addresses(model)
    with on_device(model, object()):
        assert addresses(model) == before


@pytest.mark.gpu
@torch.no_grad()
def test_nothing_of_a_model_is_on_the_gpu_between_its_phases(load, batch):
    model = load().requires_grad_(False)
    expected = token_log_probs(model, batch).log_probs
    device = torch.device("cuda", 0)
    keep_on_host(model, device)
    before = torch.cuda.memory_allocated()
    with on_device(model):
        computed = token_log_probs(model, batch.to(device)).log_probs.cpu()
    torch.testing.assert_close(computed, expected, rtol=1e-3, atol=1e-3)
    assert torch.cuda.memory_allocated() - before < 1 << 20
