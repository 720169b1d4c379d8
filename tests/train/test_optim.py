"""Learning-rate schedules by hand, which parameter gets what, the clip, and that every optimiser trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gradients import gradient, reference
from plain_models import relative_error
from splits import Split
from steps import Setup, build, one_step, same, train

from rlhf_suite.config.declarations.models import AdamConfig, MuonConfig, TrainedModelConfig
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.train.optim import adamw
from rlhf_suite.train.schedules import learning_rate_factor
from rlhf_suite.train.strategy import load_trained


@pytest.mark.notices(
    "the first optimiser step trains nothing",
    "train/schedules.py",
    "return (step + 1) / warmup",
    "return step / warmup",
)
@pytest.mark.notices(
    "the schedule ends before 0",
    "train/schedules.py",
    "max(1, self.total_steps - self.warmup_steps)",
    "max(1, self.total_steps)",
)
@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1, 1, 1, 1]),
        ("constant_with_warmup", [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", [1 / 3, 2 / 3, 1, 1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
        ("cosine_with_min_lr", [1 / 3, 2 / 3, 1, 1, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5)]),
    ],
)
def test_schedules_by_hand(schedule, factors):
    """Seven steps, ceil(0.4 * 7) = 3 of them warm-up, the other four at progress 0, 1/4, 2/4, 3/4."""
    config = TrainedModelConfig.of("ppo", lr_scheduler=schedule, lr_warmup_ratio=0.4, min_lr_ratio=0.2)
    assert [learning_rate_factor(step, 7, config) for step in range(7)] == pytest.approx(factors)


def test_warm_up_is_not_lengthened_by_rounding():
    """0.07 * 100 is 7.000000000000001 in binary."""
    config = TrainedModelConfig.of("ppo", lr_scheduler="linear", lr_warmup_ratio=0.07)
    assert learning_rate_factor(6, 100, config) == 1
    assert learning_rate_factor(5, 100, config) == pytest.approx(6 / 7)


def test_the_step_uses_the_scheduled_rate(ranks, folder, batch):
    """Adam's first step moves a weight by its rate, against the sign of the gradient."""
    start, moved = (ranks(1).call(train, folder, Setup(lr=1e-3), plan)[0] for plan in ([], [batch]))
    direction = reference_direction(folder, batch)
    name = "model.layers.0.mlp.down_proj.weight"
    change = moved.weights[name] - start.weights[name]
    clear = direction[name].abs() > 1e-4
    torch.testing.assert_close(change[clear], -1e-3 * direction[name].sign()[clear].float(), rtol=1e-2, atol=1e-6)


def reference_direction(folder, batch):
    return reference(folder, "next token", batch)


@pytest.mark.parametrize(("size", "zero"), [(1, 0), (1, 2), (1, 3), (2, 0), (2, 2), (2, 3)])
def test_the_clip_scales_the_whole_gradient(ranks, folder, batch, size, zero):
    wanted = reference(folder, "next token", batch)
    norm = torch.stack([one.norm() for one in wanted.values()]).norm()
    clipped = {name: 0.05 / norm * one for name, one in wanted.items()}
    split = Split("", ranks=size, zero=zero, max_norm=0.05)
    found = ranks(size).call(gradient, folder, "next token", split, batch)[0]
    assert norm > 0.1
    assert relative_error(found, clipped) < 2e-5  # torch and DeepSpeed add 1e-6 to the norm


TRAINS = [
    (1, Setup(zero=0)),
    (1, Setup(zero=1, dtype="bf16")),
    (1, Setup(zero=2, dtype="bf16")),
    (1, Setup(zero=2, offload=True)),
    (1, Setup(zero=3, offload=True)),
    (1, Setup(zero=2, lora=True)),
    *((1, Setup(zero=zero, optim="muon")) for zero in range(4)),
    *((1, Setup(zero=zero, dtype="bf16", optim="muon")) for zero in (1, 2, 3)),
    (2, Setup(zero=2, optim="muon")),
    (2, Setup(zero=3, optim="muon")),
    (2, Setup(zero=2, offload=True)),
    (2, Setup(zero=3, dtype="bf16")),
]


@pytest.mark.parametrize(("size", "setup"), TRAINS, ids=str)
def test_every_optimiser_trains(ranks, folder, batch, size, setup):
    for outcome in ranks(size).call(train, folder, setup, [batch] * 6):
        losses = [row["gpt_loss"] for row in outcome.metrics]
        assert losses[-1] < 0.75 * losses[0], losses


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_updates_too_small_for_bf16_are_not_lost(ranks, folder, batch, zero):
    """A rate of 1e-4 is below half the spacing of bf16 numbers near 0.1: only fp32 master weights keep the updates."""
    start, exact, half = (
        ranks(1).call(train, folder, setup, plan)[0].weights
        for setup, plan in (
            (Setup(), []),
            (Setup(lr=1e-4), [batch] * 9),
            (Setup(zero=zero, dtype="bf16", lr=1e-4), [batch] * 9),
        )
    )
    name = "model.layers.1.mlp.down_proj.weight"
    wanted, found = exact[name] - start[name], half[name].float() - start[name].bfloat16().float()
    large = (start[name].abs() > 0.07) & (wanted.abs() > 6e-4)
    assert large.sum() > 100
    assert float((found[large] / wanted[large]).mean()) == pytest.approx(1, abs=0.15)


@pytest.mark.notices(
    "Adam's betas change places", "train/optim.py", "(adam.betas[0], adam.betas[1])", "(adam.betas[1], adam.betas[0])"
)
@pytest.mark.notices("Adam's epsilon is torch's own", "train/optim.py", "eps=adam.eps, ", "")
def test_adamw_takes_its_flags():
    config = TrainedModelConfig.of("ppo", adam=AdamConfig(lr=0.25, betas=[0.5, 0.75], eps=1e-3, weight_decay=0.125))
    found = adamw(torch.nn.Linear(2, 2), config)
    assert (found.defaults["lr"], found.defaults["betas"], found.defaults["eps"]) == (0.25, (0.5, 0.75), 1e-3)
    assert [(group["weight_decay"], len(group["params"])) for group in found.param_groups] == [(0.125, 1), (0.0, 1)]


def moved(world, folder, batch):
    """The largest change of an embedding and of a hidden matrix in one step with Muon, half-way through a schedule."""
    from rlhf_suite.config.declarations.ds import DeepSpeedConfig

    config = TrainedModelConfig.of(
        "ppo",
        model_name_or_path=str(folder / "lm"),
        optim="muon",
        adam=AdamConfig(lr=1e-4),
        muon=MuonConfig(lr=0.1),
        lr_scheduler="linear",
        lr_warmup_ratio=0.0,
        max_norm=0.0,
    )
    ds = DeepSpeedConfig.of("sft", zero_stage=0, param_dtype="fp32", packing_samples=True)
    model = load_trained(ModelPlan("actor", config.model_name_or_path), config, ds, world, total_steps=4, seed=0)
    ends = ("embed_tokens.weight", "layers.0.mlp.down_proj.weight")
    watched = [next(p for name, p in model.module.named_parameters() if name.endswith(end)) for end in ends]
    before = [parameter.detach().clone() for parameter in watched]
    one_step(model, batch, 2, Setup())
    return [float((new.detach() - old).abs().max()) for new, old in zip(watched, before, strict=True)]


@pytest.mark.notices(
    "the learning rate of the first parameter group is that of all",
    "train/strategy.py",
    'group["lr"] = peak * factor',
    'group["lr"] = self._peaks[0] * factor',
)
def test_each_parameter_group_keeps_a_rate_of_its_own(ranks, folder, batch):
    """At half of the schedule AdamW's first step moves an embedding by 1e-4 / 2; Muon moves a matrix by far more."""
    ((embedding, hidden),) = ranks(1).call(moved, folder, batch)
    assert embedding == pytest.approx(0.5e-4, rel=1e-2)
    assert hidden > 1e-3


SLEEPING = [
    *(Setup(2, "fp32"), Setup(2, "bf16"), Setup(2, "bf16", optim="muon")),
    *(Setup(3, "fp32"), Setup(3, "bf16"), Setup(3, "bf16", accumulate="bf16")),
]


@pytest.mark.parametrize("setup", SLEEPING, ids=str)
def test_an_optimiser_state_that_leaves_the_device_between_updates_changes_no_number(ranks, folder, batch, setup):
    ranks = ranks(2)
    awake, sleeping = (
        ranks.call(train, folder, replace(setup, sleeps=sleeps), [batch] * 3)[0] for sleeps in (False, True)
    )
    assert same(sleeping.weights, awake.weights)
    assert sleeping.metrics == awake.metrics


@pytest.mark.proof
@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (Setup(0), "has no attribute 'offload_states'"),
        (Setup(1, "bf16"), "'BF16_Optimizer' object has no attribute 'offload_states'"),
    ],
    ids=str,
)
def test_deepspeed_moves_no_states_of_other_stages(ranks, folder, batch, setup, reason):
    """Why a rule refuses them; where DeepSpeed learns it, the rule can go."""
    with pytest.raises(AssertionError, match=reason):
        ranks(1).call(train, folder, replace(setup, sleeps=True), [batch])


def states_of(world, folder, batch, setup):
    """The addresses of the fp32 weights and of the moments of a rank: awake, asleep and awake again."""
    model = build(world, folder, setup)
    one_step(model, batch, 0, setup)
    optimizer, seen = model.optimizer, []

    def note() -> None:
        moments = [value for state in optimizer.optimizer.state.values() for value in state.values()]
        held = [
            *optimizer.fp32_partitioned_groups_flat,
            *(value for value in moments if torch.is_tensor(value) and value.dim()),
        ]
        seen.append({tensor.data_ptr() for tensor in held})

    note()
    model.optimizer_to_host()
    note()
    with model.optimizer_on_device():
        note()
    return seen


@pytest.mark.notices(
    "fp32 weights of ZeRO-3 stay on the device while the model sleeps",
    "train/state_moves.py",
    "partition.data = host.copy_(partition.detach())",
    "host.copy_(partition.detach())",
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fp32_weights_of_zero_3_have_other_memory_while_the_model_sleeps(ranks, folder, batch, dtype):
    """On the CPU host and device are one, but what moves is copied."""
    for awake, asleep, again in ranks(2).call(states_of, folder, batch, Setup(3, dtype)):
        assert len(awake - asleep) >= 1 and len(asleep - again) >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("zero", [2, 3])
def test_an_optimiser_state_in_host_memory_frees_that_of_the_device(gpu_world, folder, batch, zero):
    """In this process: the ranks of other tests are on the CPU."""
    assert freed_bytes(gpu_world, folder, batch, zero) > 0


def freed_bytes(world, folder, batch, zero: int) -> int:
    """How much less memory of the GPU is in use after the states have left it."""
    model = build(world, folder, Setup(zero=zero, dtype="bf16"))
    one_step(model, batch, 0, Setup())
    before = torch.cuda.memory_allocated()
    model.optimizer_to_host()
    return before - torch.cuda.memory_allocated()
