"""The gradient of the policy on replayed routes is the same, whatever splits an optimiser step up."""

from __future__ import annotations

from dataclasses import replace

import gradients
import pytest
import torch
from plain_models import make_models, relative_error
from splits import Split

pytestmark = pytest.mark.stack
LOSS = "ppo, token-mean"
SPLITS = [
    Split("micro-batches of 1", micro=1),
    Split("padded", micro=3, packed=False),
    Split("2 ranks, ZeRO-3", ranks=2, zero=3, micro=2),
    Split("2 ranks that split the tokens", ranks=2, zero=2, micro=2, sequence=2, mode="ring"),
]


@pytest.fixture(scope="module")
def routed(ranks, tmp_path_factory):
    """A model, a batch with random routes, and the gradient of all of it at once on one rank."""
    folder = make_models(tmp_path_factory.mktemp("routed"), "qwen3_moe")
    batch = gradients.make_batch(folder)
    order = torch.rand(batch.num_tokens, 2, 4, generator=torch.Generator().manual_seed(1)).argsort(-1)
    batch = replace(batch, routes=order[..., :2].to(torch.int8))
    whole = Split("whole", micro=len(batch))
    return folder, batch, ranks(1).call(gradients.gradient, folder, LOSS, whole, batch)[0]


@pytest.mark.notices(
    "a rank that holds a part of the tokens takes the routes of others",
    "models/routing.py",
    "    return torch.cat([routes, padding])[sequences.shard.tokens]",
    "    return torch.cat([routes, padding])[: len(sequences.shard.tokens)]",
    cases="split",
)
@pytest.mark.notices(
    "padded rows have the routes of other tokens",
    "models/routing.py",
    "return whole.flatten(0, 1).index_copy(0, sequences.slots, routes)",
    "return whole.flatten(0, 1).index_copy(0, sequences.slots, routes.flip(0))",
    cases="padded",
)
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_the_gradient_is_that_of_one_rank(ranks, routed, split):
    folder, batch, wanted = routed
    found = ranks(split.ranks).call(gradients.gradient, folder, LOSS, split, batch)[0]
    assert relative_error(found, wanted) <= 1e-5
    plain = ranks(1).call(gradients.gradient, folder, LOSS, SPLITS[0], replace(batch, routes=None))[0]
    assert relative_error(plain, wanted) > 1e-2
