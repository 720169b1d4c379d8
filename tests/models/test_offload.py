"""A model streamed from host memory computes what it computes on the device, and keeps nothing there in between."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.models.forward import sequence_scores, token_log_probs
from rlhf_suite.models.prepare import stream_from_host


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_a_streamed_model_computes_the_same_and_keeps_nothing_on_the_device(load, batch, family):
    model = load(family).requires_grad_(False)
    expected = token_log_probs(model, batch).log_probs
    streamed = stream_from_host(model, torch.device("cpu"))
    for _ in range(2):
        assert all(parameter.is_meta for parameter in streamed.parameters())
        torch.testing.assert_close(token_log_probs(streamed, batch).log_probs, expected, rtol=0, atol=0)


@torch.no_grad()
def test_a_streamed_reward_model_scores_the_same(load, batch):
    model = load(head="value").requires_grad_(False)
    expected = sequence_scores(model, batch)
    torch.testing.assert_close(
        sequence_scores(stream_from_host(model, torch.device("cpu")), batch), expected, rtol=0, atol=0
    )


@pytest.mark.gpu
@torch.no_grad()
def test_only_the_modules_in_use_are_on_the_gpu(load, batch):
    model = load().requires_grad_(False)
    expected = token_log_probs(model, batch).log_probs
    device = torch.device("cuda", 0)
    streamed = stream_from_host(model, device)
    before = torch.cuda.memory_allocated()
    found = token_log_probs(streamed, batch.to(device)).log_probs
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
    del found
    assert torch.cuda.memory_allocated() - before < 1 << 20
