"""ds.cpu_adam=deepspeed: DeepSpeed's AdamW in host memory updates as torch's does, and each goes on from the other."""

from __future__ import annotations

import pytest
import torch
from gradients import make_batch
from reshape import distance, load_and_go_on, save_and_go_on
from steps import Setup, build, same, train

from rlhf_suite.config.declarations.models import AdamConfig, TrainedModelConfig
from rlhf_suite.errors import UserError
from rlhf_suite.train.optim import adamw, cpu_adamw

pytestmark = pytest.mark.stack

STEPS = 20


@pytest.fixture(scope="module")
def compiled():
    """Compile it before ranks wait for it: minutes on a busy machine, once for a user."""
    builder = pytest.importorskip("deepspeed.ops.op_builder")
    try:
        builder.CPUAdamBuilder().load(verbose=False)
    except RuntimeError as error:
        pytest.skip(f"DeepSpeedCPUAdam cannot be compiled here: {error}")


@pytest.mark.notices(
    "DeepSpeed's AdamW in host memory has betas of its own",
    "train/optim.py",
    "lr=adam.lr, betas=adam.betas, eps=adam.eps",
    "lr=adam.lr, eps=adam.eps",
)
@pytest.mark.proof
def test_its_updates_are_those_of_torch(compiled):
    """In fp32 from the same numbers: they round in another order, so they differ by a few units of the last place of a
    weight or of an update in each step."""
    config = TrainedModelConfig.of("ppo", adam=AdamConfig(lr=1e-2, betas=[0.9, 0.95], weight_decay=0.1))
    generator = torch.Generator().manual_seed(0)
    first = torch.nn.Linear(64, 33)
    second = torch.nn.Linear(64, 33)
    second.load_state_dict(first.state_dict())
    optimizers = adamw(first, config), cpu_adamw(second, config)
    start = first.weight.detach().clone()
    for _ in range(STEPS):
        for name, parameter in first.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            second.get_parameter(name).grad = parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    epsilon = torch.finfo(torch.float32).eps
    largest = max(float(parameter.detach().abs().max()) for parameter in first.parameters())
    for name, parameter in first.named_parameters():
        difference = float((parameter - second.get_parameter(name)).detach().abs().max())
        assert difference <= STEPS * 2 * epsilon * (largest + config.adam.lr), name
    assert float((first.weight - start).detach().abs().max()) > config.adam.lr


@pytest.mark.notices(
    "ds.cpu_adam means the other AdamW",
    "train/strategy.py",
    'self.ds.adam_offload and self.ds.cpu_adam == "deepspeed"',
    'self.ds.adam_offload and self.ds.cpu_adam == "torch"',
)
@pytest.mark.proof
@pytest.mark.parametrize(("cpu_adam", "name"), [("torch", "AdamW"), ("deepspeed", "DeepSpeedCPUAdam")])
def test_the_flag_says_who_updates(ranks, folder, compiled, cpu_adam, name):
    assert ranks(1).call(updated_by, folder, offloaded(Setup(2), cpu_adam)) == [name]


def updated_by(world, folder, setup):
    return type(build(world, folder, setup).optimizer.optimizer).__name__


@pytest.mark.proof
@pytest.mark.parametrize("setup", [Setup(1), Setup(2, "bf16"), Setup(3)], ids=str)
def test_steps_are_those_of_torch(ranks, folder, batch, compiled, setup):
    by_torch, by_deepspeed = (
        ranks(2).call(train, folder, offloaded(setup, name), [batch] * 3)[0] for name in ("torch", "deepspeed")
    )
    tolerance = 1e-5 if setup.dtype == "fp32" else 2e-2
    for name, value in by_torch.weights.items():
        torch.testing.assert_close(by_deepspeed.weights[name], value, rtol=0, atol=tolerance, msg=name)
    assert not same(by_deepspeed.weights, ranks(2).call(train, folder, offloaded(setup, "deepspeed"), [])[0].weights)


@pytest.mark.proof
@pytest.mark.parametrize(("before", "after"), [("torch", "deepspeed"), ("deepspeed", "torch"), ("deepspeed",) * 2])
def test_a_run_goes_on_with_the_other(ranks, folder, tmp_path, compiled, before, after):
    """Also at another ZeRO stage; the moments and the count of updates are what was saved."""
    batches = [make_batch(folder)] * 6
    saved = ranks(1).call(save_and_go_on, folder, offloaded(Setup(2), before), batches, tmp_path / "saved")[0]
    ((again,),) = ranks(1).call(load_and_go_on, folder, offloaded(Setup(3), after), batches, [tmp_path / "saved"])
    assert same(again.state, saved.state)
    assert distance(again.weights, saved.weights) < 1e-6


def offloaded(setup, cpu_adam):
    from dataclasses import replace

    return replace(setup, offload=True, cpu_adam=cpu_adam)


@pytest.mark.notices(
    "a machine without a compiler ends a run with a traceback",
    "train/optim.py",
    "except RuntimeError as error:",
    "except ValueError as error:",
)
@pytest.mark.stack
def test_without_a_compiler_the_flag_is_refused_with_the_reason(monkeypatch, tmp_path):
    """An empty folder for what is compiled, and a compiler that is not there."""
    builder = pytest.importorskip("deepspeed.ops.op_builder.builder").OpBuilder
    monkeypatch.setattr(builder, "_loaded_ops", {})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no_such_compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"ds\.cpu_adam=deepspeed: .* cannot be compiled here .* set ds\.cpu_adam=torch"
    ):
        cpu_adamw(torch.nn.Linear(2, 2), TrainedModelConfig.of("ppo"))
