"""An optimiser step whose gradients are added by several calls, with passes without a gradient between them, is the
step of one call, bit for bit, whatever divides the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from steps import OBJECTIVES, Outcome, Setup, build, same, train

from rlhf_suite.data.batch import take
from rlhf_suite.data.packing import micro_batches
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.rl.sharding import balanced_parts, shards
from rlhf_suite.train.step import accumulate, global_counts, update

pytestmark = pytest.mark.stack

SETUPS = [
    (1, Setup(zero=2, dtype="bf16", offload=True)),
    (2, Setup(zero=0)),
    (2, Setup(zero=3)),
    *(
        pytest.param(*case, marks=pytest.mark.proof)
        for case in [
            (1, Setup(zero=None)),
            (1, Setup(zero=0)),
            (1, Setup(zero=2, lora=True)),
            (2, Setup(zero=1)),
            (2, Setup(zero=2)),
            (2, Setup(zero=2, dtype="bf16")),
        ]
    ),
]


def train_by_calls(world, folder, setup, batches) -> Outcome:
    """Do as `steps.train` does, with a call for the first micro-batch of each rank and one for the others."""
    torch.manual_seed(0)
    model, outcome, objective = build(world, folder, setup), Outcome(), OBJECTIVES[setup.objective]
    for step, batch in enumerate(batches):
        mine = shards(batch, balanced_parts(batch, model.world.mesh.data))[model.world.data_index]
        parts = [take(mine, group) for group in micro_batches(mine.lengths.tolist(), count=3)]
        counts = global_counts(objective, parts, model.world)
        done = []
        for call in (parts[:1], parts[1:]):
            assert call, "each rank has several micro-batches"
            done.append(accumulate(model, objective, call, counts))
            with torch.no_grad():
                accumulate(model, objective, parts[:1], backward=False)
        outcome.metrics.append(update(model, done, step, setup.on_nonfinite))
    outcome.weights = weights_on_cpu(model.module, model.gather)
    return outcome


@pytest.mark.parametrize(("size", "setup"), SETUPS, ids=str)
def test_calls_that_add_up_are_the_step(ranks, folder, batch, size, setup):
    setup, few = replace(setup, objective="ppo"), take(batch, range(12))
    calls = ranks(size).call(train_by_calls, folder, setup, [few, few])
    whole = ranks(size).call(train, folder, setup, [few, few])
    for one, other in zip(calls, whole, strict=True):
        assert same(one.weights, other.weights)
        assert [row["grad_norm"] for row in one.metrics] == [row["grad_norm"] for row in other.metrics]
