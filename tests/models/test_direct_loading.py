"""A model whose tensors are read to a device at once is that which is read to host memory and moved."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.models.load import load_model
from rlhf_suite.train.settings import device_to_load_to

DS = DeepSpeedConfig.of("sft", param_dtype="fp32")


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_are_the_same_and_no_hook_moves_them_later(head, device):
    plain = load_model("builtin:tiny", head=head, ds=DS, seed=3)
    direct = load_model("builtin:tiny", head=head, ds=DS, seed=3, device=torch.device(device))
    weights = dict(plain.named_parameters())
    assert [name for name, _ in direct.named_parameters()] == [*weights]
    for name, weight in direct.named_parameters():
        assert weight.device.type == device and torch.equal(weight.cpu(), weights[name]), name
    assert not any(hasattr(module, "_hf_hook") for module in direct.modules())


@pytest.mark.notices(
    "a model that ZeRO-3 divides is read to the GPU whole", "train/settings.py", "and ds.zero_stage != 3 and", "and"
)
def test_models_are_read_to_a_gpu_unless_something_divides_them_first():
    gpu = torch.device("cuda", 0)
    alone, split = World(0, Mesh(2), gpu), World(0, Mesh(2, tensor=2), gpu)
    assert device_to_load_to(DeepSpeedConfig.of("sft", zero_stage=2), alone) == gpu
    assert device_to_load_to(DeepSpeedConfig.of("sft", zero_stage=None), alone) == gpu
    assert device_to_load_to(DeepSpeedConfig.of("sft", zero_stage=3), alone) is None
    assert device_to_load_to(DeepSpeedConfig.of("sft", zero_stage=2), split) is None
    assert device_to_load_to(DeepSpeedConfig.of("sft", zero_stage=2), World(0, Mesh(2), torch.device("cpu"))) is None
