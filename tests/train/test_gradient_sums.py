"""In bf16 the gradient of a step is as exact with many micro-batches as with few: its sum is kept in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from policy_formulas import NextToken

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.distributed.world import World
from rlhf_suite.models.load import load_model
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.train import strategy
from rlhf_suite.train.step import optimizer_step

pytestmark = pytest.mark.stack

SEQUENCES, LENGTH = 128, 8


class KeepGradient(torch.optim.Optimizer):
    """Changes nothing, and remembers the gradient."""

    kept: torch.Tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.kept = torch.cat([p.grad.flatten().double() for p in parameters])


def many_sequences() -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (SEQUENCES * LENGTH,), generator=generator)
    mask = torch.ones(SEQUENCES, LENGTH)
    mask[:, 0] = 0
    lengths = torch.full((SEQUENCES,), LENGTH)
    return TokenBatch(ids, lengths, mask.flatten(), torch.arange(SEQUENCES))


def gradient_sum(world: World, folder: Path, dtype: str, zero: int, size: int) -> torch.Tensor:
    """The gradient of one step with micro-batches of `size` sequences, of the weights rounded to bf16."""
    ds = DeepSpeedConfig.of("sft", zero_stage=zero, param_dtype=dtype, packing_samples=True)
    config = TrainedModelConfig.of("ppo", max_norm=0.0, lr_scheduler="constant")
    with strategy.make_load_context(ds):
        module = load_model(str(folder / "lm"), head="lm", ds=ds)
    with torch.no_grad(), strategy.gather_parameters(ds, list(module.parameters()), modifier_rank=0):
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())
    make_trainable(module, config, ds.lora)
    before = strategy.optim.adamw
    kept: list[KeepGradient] = []

    def keeper(module: torch.nn.Module, _: TrainedModelConfig) -> KeepGradient:
        kept.append(KeepGradient(list(module.parameters()), {"lr": 1.0}))
        return kept[0]

    strategy.optim.adamw = keeper
    try:
        model = strategy.TrainedModel(module, config, ds, 1, world)
    finally:
        strategy.optim.adamw = before
    batch = many_sequences()
    parts = [take(batch, range(start, start + size)) for start in range(0, SEQUENCES, size)]
    optimizer_step(model, NextToken(), parts, 0, "stop")
    return kept[0].kept


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_error_of_a_bf16_gradient_does_not_grow_with_the_number_of_micro_batches(ranks, folder, zero):
    """Of one that is summed in bf16 it is 1.3 times as large with 128 micro-batches as with 4."""
    (exact,) = ranks(1).call(gradient_sum, folder, "fp32", zero, SEQUENCES)
    errors = []
    for size in (SEQUENCES // 4, 1):
        (found,) = ranks(1).call(gradient_sum, folder, "bf16", zero, size)
        errors.append(float((found - exact).norm() / exact.norm()))
    few, many = errors
    assert many < 1.1 * few
