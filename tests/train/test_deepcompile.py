"""ds.deepcompile: steps of compiled graphs, which need a GPU; and why the rules refuse it elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from steps import Setup, train

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.train.settings import engine_config

COMPILED = [Setup(1, compiled=True), Setup(2, "bf16", compiled=True), Setup(3, "bf16", compiled=True)]


@pytest.mark.notices(
    "ds.deepcompile is not said to DeepSpeed",
    "train/settings.py",
    'config["compile"] = {"deepcompile": True}',
    'config["compile"] = {"deepcompile": False}',
)
@pytest.mark.notices(
    "compiled graphs do not know which backward pass is the last",
    "train/settings.py",
    "return ds.deepcompile or (ds.zero_stage == 1 and ds.overlap_comm is True)",
    "return ds.zero_stage == 1 and ds.overlap_comm is True",
)
def test_deepspeed_is_told_to_compile_and_which_backward_pass_is_the_last():
    """Its engine refuses to compile without the second."""
    world = World.of(0, Mesh(1), torch.device("cpu"))
    for is_on in (False, True):
        found = engine_config(DeepSpeedConfig.of("sft", zero_stage=3, deepcompile=is_on), 1.0, world)
        assert found.get("compile") == ({"deepcompile": True} if is_on else None)
        assert found["managed_gradient_accumulation"] is is_on


@pytest.mark.stack
def test_deepspeed_compiles_for_gpus_alone():
    """Why a rule refuses the CPU; where DeepSpeed learns it, the rule can go."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.compile.util import is_deepcompile_supported

    assert is_deepcompile_supported() == (get_accelerator().device_name() == "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("setup", COMPILED, ids=str)
def test_compiled_steps_are_those_without(gpu_world, folder, batch, setup):
    """In this process: the ranks of other tests are on the CPU. Every parameter has a gradient."""
    plain, found, start = (
        train(gpu_world, folder, each, [batch] * steps).weights
        for each, steps in ((replace(setup, compiled=False), 3), (setup, 3), (setup, 0))
    )
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4 if setup.dtype == "fp32" else 3e-2, msg=name)
        assert not torch.equal(found[name], start[name]), f"{name} was not trained"
