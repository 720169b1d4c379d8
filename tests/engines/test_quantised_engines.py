"""Real engines that quantise the weights of every sync: fp8 with a scale per row, which vLLM can do on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import ray
import torch
from probed_engines import MAX_LEN, PROMPT, checkpoint, log_probs_of, make_model

from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.engines.start import engine_env
from rlhf_suite.weight_sync.digests import WeightSyncError
from rlhf_suite.weight_sync.sender import ShmSender

pytestmark = pytest.mark.proof
LARGEST = 448.0  # of the numbers in fp8 with four bits of exponent
NOISE = 0.1  # nats, on average: other weights of the same kind give 0.5 and more
MERGED = {"self_attn.qkv_proj": ("q", "k", "v"), "self_attn.o_proj": ("o",), "mlp.gate_up_proj": ("gate", "up")}


class ProbedEngine(Engine):
    """An engine whose weights a test can damage."""

    async def damage(self, name: str) -> None:
        def change(model):
            model.get_parameter(name).data[-1] += 1.0

        await self._call(lambda engine: engine.apply_model(change))

    async def matrix(self, name: str) -> torch.Tensor:
        """What a quantised matrix of the model stands for, [out, in]."""

        def read(model):
            layer = model.get_submodule(name)
            return layer.weight.float().t() * layer.weight_scale.view(-1, 1)

        return (await self._call(lambda engine: engine.apply_model(read)))[0]


def round_rows(values: torch.Tensor) -> torch.Tensor:
    """The values as numbers of fp8 times a scale of each row."""
    scale = values.abs().amax(-1, keepdim=True) / LARGEST
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def bf16_model(seed: int):
    """A model in fp32 whose numbers are those of bf16."""
    return make_model("tied", seed).to(torch.bfloat16).float()


@pytest.fixture(scope="module")
def engine(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("tied", 0).to(torch.bfloat16).save_pretrained(folder)
    config = VLLMConfig.of("ppo", kv_cache_mb=8, quantization="fp8_per_channel")
    spec = EngineSpec(str(folder), "bfloat16", "cpu", MAX_LEN, 0, config, load_weights=False)
    tested = ray.remote(ProbedEngine).options(num_cpus=0.1, runtime_env={"env_vars": engine_env("cpu")})
    handle = tested.remote(spec)
    yield handle
    ray.kill(handle)


def sync(engine, model, version: int):
    sender = ShmSender(torch.bfloat16, check=True)
    try:
        return ray.get(engine.update_weights.remote(sender.send(version, checkpoint(model))))
    finally:
        sender.release()


def test_every_sync_is_quantised_anew(engine):
    for version in (1, 2):
        model = bf16_model(version)
        sync(engine, model, version)
        for name, parts in MERGED.items():
            place = f"model.layers.1.{name}"
            sent = [model.get_submodule(f"{place.rpartition('.')[0]}.{part}_proj").weight for part in parts]
            expected = round_rows(torch.cat(sent).detach())
            torch.testing.assert_close(ray.get(engine.matrix.remote(place)), expected, rtol=1e-6, atol=0)
        (theirs,) = ray.get(engine.score.remote([PROMPT]))
        assert 1e-3 < np.abs(theirs - log_probs_of(model, PROMPT))[1:].mean() < NOISE


def test_all_but_the_quantised_matrices_are_read_back(engine):
    model = bf16_model(3)
    report = sync(engine, model, 3)
    quantised = {name for name, tensor in checkpoint(model) if "layers" in name and tensor.dim() == 2}
    assert {*report.not_readable} == quantised and len(quantised) == 14
    assert report.received - report.read_back == len(quantised) < report.received
    ray.get(engine.damage.remote("model.norm.weight"))
    with pytest.raises(WeightSyncError, match=r"tensor model.norm.weight .* differs in"):
        ray.get(engine.attest.remote())
