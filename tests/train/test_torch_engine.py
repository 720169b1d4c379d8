"""Training without DeepSpeed (ds.zero_stage=null): the gradients of the formulas, the steps of DeepSpeed, one state."""

from __future__ import annotations

import math
from dataclasses import replace

import gradients
import pytest
import torch
from gradients import gradient, reference
from plain_models import relative_error
from splits import Split
from steps import Setup, build, one_step, same, train

from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.train.torch_engine import MasterWeights

ALONE = Setup(zero=None)
SPLITS = [
    Split("micro 2", zero=None, micro=2),
    Split("token budget, checkpointing", zero=None, budget=True, checkpointing="plain"),
    Split("LoRA, padded", zero=None, lora=True, packed=False),
]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
@pytest.mark.parametrize("loss", ["next token", "ppo, token-mean", "value"])
def test_a_step_has_the_gradient_of_the_formula(ranks, folder, batch, loss, split):
    (found,) = ranks(1).call(gradient, folder, loss, split, batch)
    assert relative_error(found, reference(folder, loss, batch, split.lora)) < 1e-5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_in_this_process_has_the_gradient_of_the_formula(folder, batch, device):
    wanted = reference(folder, "ppo, token-mean", batch)  # before Liger's kernels are in this process
    world = World(0, Mesh(1), torch.device(device))
    found = gradient(world, folder, "ppo, token-mean", Split("alone", zero=None, max_norm=0.0), batch)
    assert relative_error({name: each.cpu() for name, each in found.items()}, wanted) < 1e-5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_in_bf16_learns_without_deepspeed(folder, batch, device):
    outcome = train(World(0, Mesh(1), torch.device(device)), folder, Setup(zero=None, dtype="bf16"), [batch] * 6)
    losses = [row["gpt_loss"] for row in outcome.metrics]
    assert losses[-1] < 0.75 * losses[0], losses


@pytest.mark.parametrize("changes", [{}, {"lora": True}, {"max_norm": 0.05}, {"max_norm": 0.0}], ids=str)
def test_steps_in_fp32_are_those_of_deepspeed_bit_for_bit(ranks, folder, batch, changes):
    alone, other = (
        ranks(1).call(train, folder, replace(setup, **changes), [batch] * 3)[0] for setup in (ALONE, Setup(zero=0))
    )
    assert same(alone.weights, other.weights)
    assert alone.metrics == other.metrics


def test_steps_in_bf16_are_those_of_deepspeed(ranks, folder, batch):
    """DeepSpeed updates all weights as one row, in which rounding may differ by the last bit of a master weight: few
    bf16 weights are rounded to the neighbour then."""
    (alone, other), (longer, other_longer) = (
        [ranks(1).call(train, folder, Setup(zero=zero, dtype="bf16"), [batch] * steps)[0] for zero in (None, 1)]
        for steps in (1, 3)
    )
    for name, weight in alone.weights.items():
        torch.testing.assert_close(weight, other.weights[name], rtol=2**-7, atol=0)
        assert (weight != other.weights[name]).float().mean() < 0.01
    for mine, theirs in zip(longer.metrics, other_longer.metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=5e-3)


@pytest.mark.notices(
    "without DeepSpeed a bf16 weight is its own master",
    "train/torch_engine.py",
    "p: p if p.dtype == torch.float32 else p.detach().float() for p in trained",
    "p: p for p in trained",
)
def test_updates_too_small_for_bf16_are_kept_in_the_master_weights(ranks, folder, batch):
    """At a rate of 1e-6 no bf16 weight near 0.1 moves in a step, and in 3 steps its master moves by 3e-6 at most."""
    start, rounded, moved = ranks(1).call(small_steps, folder, batch)[0]
    assert 0 < moved <= 3.1e-6
    assert torch.equal(start, rounded)


def small_steps(world, folder, batch):
    """A weight matrix before and after 3 steps in bf16, and how far its master has moved."""
    setup = Setup(zero=None, dtype="bf16", lr=1e-6)
    model = build(world, folder, setup)
    weight = model.module.model.model.layers[1].mlp.down_proj.weight
    large = weight.detach().abs() > 0.07
    start, master = weight.detach()[large].clone(), model.optimizer.masters[weight]
    for step in range(3):
        one_step(model, batch, step, setup)
    return start, weight.detach()[large], float((master.detach()[large] - start.float()).abs().max())


@pytest.mark.notices(
    "without DeepSpeed the gradient of a micro-batch replaces the sum of those before",
    "train/torch_engine.py",
    "master.grad += gradient",
    "master.grad = gradient.float()",
)
@pytest.mark.parametrize("accumulate", ["fp32", "bf16"])
def test_gradients_of_micro_batches_are_added_up_in_the_type_of_the_flag(accumulate):
    """256 + 1 is 257 in fp32, and 256 in bf16."""
    from rlhf_suite.config.declarations.ds import DeepSpeedConfig
    from rlhf_suite.config.declarations.models import TrainedModelConfig
    from rlhf_suite.train.torch_engine import TorchEngine

    module = torch.nn.Linear(1, 1, bias=False).bfloat16()
    engine = TorchEngine(
        module, TrainedModelConfig.of("ppo", max_norm=0.0), DeepSpeedConfig.of("sft", grad_accum_dtype=accumulate)
    )
    for slope in (256.0, 1.0):
        engine.backward(engine(torch.full((1, 1), slope).bfloat16()).sum())
    engine.step()
    assert engine.get_global_grad_norm() == (257.0 if accumulate == "fp32" else 256.0)
    assert all(each.grad is None for pair in engine.optimizer.masters.items() for each in pair)


def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_does(ranks, folder, batch):
    setup = replace(ALONE, objective="infinite", dtype="bf16")
    start, skipped = (ranks(1).call(train, folder, setup, plan)[0] for plan in ([], [batch]))
    assert same(start.weights, skipped.weights)
    assert (skipped.metrics[0]["skipped"], skipped.metrics[0]["grad_norm"]) == (1.0, math.inf)
    fine = gradients.take(batch, [row for row in range(len(batch)) if row != 4])
    after = ranks(1).call(train, folder, setup, [batch, fine])[0]
    assert not same(start.weights, after.weights)


CONTINUED = [
    (ALONE, Setup(2)),
    (Setup(3), ALONE),
    (Setup(None, "bf16"), Setup(1, "bf16")),
    (Setup(2, "bf16"), Setup(None, "bf16")),
    (Setup(None, "bf16", lora=True), Setup(None, "bf16", lora=True)),
]


@pytest.mark.parametrize(("setup", "other"), CONTINUED, ids=str)
def test_a_checkpoint_goes_on_with_and_without_deepspeed(ranks, folder, batch, tmp_path, setup, other):
    ((before, loaded, wanted, found),) = ranks(1).call(continued, folder, batch, setup, other, tmp_path)
    assert same(before, loaded)
    tolerance = 0 if setup == other else {"fp32": 1e-6, "bf16": 2e-2}[setup.dtype]
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=tolerance)


def continued(world, folder, batch, setup, other, checkpoint):
    """The weights when a run is saved and when another one has loaded it, and those of both after two more steps."""
    torch.manual_seed(0)
    model = build(world, folder, setup)
    for step in range(2):
        one_step(model, batch, step, setup)
    model.save_state(checkpoint)
    second = build(world, folder, other)
    second.load_state(checkpoint)
    found = []
    for step in range(2, 5):
        found += [
            {name: value.clone() for name, value in weights_on_cpu(each.module, each.gather).items()}
            for each in (model, second)
        ]
        one_step(model, batch, step, setup)
        one_step(second, batch, step, other)
    return found[0], found[1], found[4], found[5]


def test_an_fp32_parameter_is_its_own_master():
    from rlhf_suite.config.declarations.models import TrainedModelConfig

    module = torch.nn.Linear(2, 2)
    optimizer = MasterWeights(module, TrainedModelConfig.of("ppo"))
    assert all(master is parameter for parameter, master in optimizer.masters.items())
    assert optimizer.rounded == []
