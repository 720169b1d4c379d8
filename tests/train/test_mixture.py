"""The load-balancing loss of a mixture of experts: real micro-batches weigh by their tokens, fill-ins by nothing."""

from __future__ import annotations

import gradients
import pytest
import torch
from plain_models import relative_error

from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.optim import TrainedModelConfig
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.models.builtin import Shape, create
from rlhf_suite.tasks.sft import SFT
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.strategy import load_trained

GROUPS = [[[0, 1], [2, 3], [4, 5]], [[6, 7]]]  # three micro-batches on one rank, one on the other


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe") / "model"
    create(path, Shape(family="mixtral"))
    return path


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 20, 4, 17, 30, 5, 12, 8])
    ids = torch.randint(0, 256, (int(lengths.sum()),), generator=generator)
    plain = TokenBatch(ids, lengths)
    mask = torch.ones(len(ids)).index_fill(0, plain.starts, 0)
    return TokenBatch(ids, lengths, {"mask": mask}, {"index": torch.arange(8)})


def gradient(world, folder, zero, batch, groups):
    """The gradient of SFT with a large auxiliary loss, and the metrics."""
    ds = DeepSpeedConfig(zero_stage=zero, param_dtype="fp32", packing_samples=True)
    config = TrainedModelConfig(model_name_or_path=str(folder), max_norm=0, lr_scheduler="constant")
    with gradients.gradient_writer():
        model = load_trained(config, "lm", ds, world, total_steps=1, seed=0, aux_loss=True, flag="")
    parts = [take(batch, group) for group in groups[world.rank]]
    metrics = optimizer_step(model, SFT(None, aux_loss_coef=10.0), parts, 0, "stop")
    with model.gathered(list(model.module.parameters())):
        return {name: p.detach().clone() for name, p in model.module.named_parameters()}, metrics


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_ranks_with_other_numbers_of_micro_batches_give_the_same_gradient(ranks, folder, batch, zero):
    wanted, metrics = ranks(1).call(gradient, folder, 0, batch, [[*GROUPS[0], *GROUPS[1]]])[0]
    found, others = ranks(2).call(gradient, folder, zero, batch, GROUPS)[0]
    assert relative_error(found, wanted) < 1e-5
    assert others["aux_loss"] == pytest.approx(metrics["aux_loss"], rel=1e-6)
    router = next(value for name, value in wanted.items() if "gate" in name or "router" in name)
    assert router.norm() > 0
