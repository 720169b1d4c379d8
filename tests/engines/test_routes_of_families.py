"""Engines of every family whose routers are known return routes that the trainer's routers choose for equal weights."""

from __future__ import annotations

import numpy as np
import pytest
import ray
import torch

from families import make_typed
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.generation import GenerationRequest, SamplingSettings
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.engines.start import engine_env
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.load import load_model

pytestmark = [pytest.mark.stack, pytest.mark.proof]
HEADS = {"hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2}
KINDS = {
    "mixtral": HEADS,
    "qwen2_moe": HEADS | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3_moe": HEADS,
    "glm4_moe": HEADS | {"num_hidden_layers": 3, "n_group": 2, "topk_group": 1, "n_routed_experts": 8},
    "gpt_oss": HEADS | {"layer_types": None},
}
PROMPT, NEW = [3 + (7 * i) % 200 for i in range(24)], 20


@ray.remote(num_cpus=0.1, runtime_env={"env_vars": engine_env("cpu")})
class Sampled:
    """A process that lets an engine write one response."""

    async def generate(self, folder: str):
        spec = EngineSpec(folder, "float32", "cpu", 64, 0, VLLMConfig.of("ppo", kv_cache_mb=8), returns_routes=True)
        engine = Engine(spec)
        await engine.submit("test", [(0, GenerationRequest(0, PROMPT, NEW, 0, SamplingSettings()))])
        ((_, answer),) = await engine.wait_for_finished("test")
        await engine.close()
        return answer


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_log_probs_are_those_of_the_engine(cluster, tmp_path, kind):
    make_typed(tmp_path, kind, **KINDS[kind])
    answer = ray.get(Sampled.remote().generate.remote(str(tmp_path)), timeout=120)
    ids = torch.tensor([*PROMPT, *answer.ids.tolist()])
    last = np.full((1, *answer.routes.shape[1:]), -1, answer.routes.dtype)
    routes = torch.from_numpy(np.concatenate([answer.routes, last]))
    batch = TokenBatch(ids, torch.tensor([len(ids)]), torch.ones(len(ids)), routes=routes)
    model = load_model(str(tmp_path), head="lm", ds=DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True))
    with torch.no_grad():
        found = token_log_probs(model, batch)
    gap = (found.log_probs[len(PROMPT) :] - torch.tensor(answer.log_probs)).abs()
    print(kind, f"mean {gap.mean():.1e}, max {gap.max():.1e}, rerouted {found.rerouted.mean():.1e}")
    assert gap.mean() < 1e-5 and found.rerouted.mean() < 1e-2
