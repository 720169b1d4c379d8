"""Engines of many families of models get what the trainer sends: every tensor is read back, and a changed number in any
of them is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

import families
from rlhf_suite.config.rollout import VLLMConfig
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.engines.start import engine_env
from rlhf_suite.models.weights import iterate_merged
from rlhf_suite.weight_sync.digests import WeightSyncError
from rlhf_suite.weight_sync.sender import ShmSender

# Heads of 32 dimensions, which the CPU kernels have; the vocabulary of 261 tokens is padded.
WIDE = {"hidden_size": 64, "num_attention_heads": 2}
GROUPED = WIDE | {"num_key_value_heads": 1}
GPT2 = {"n_embd": 64, "n_head": 2}
WIDE_EXPERTS = GROUPED | {"head_dim": 32}
# For each kind: its family, its settings, and what is special in how its weights are stored or loaded.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "llama tied": ("llama", GROUPED | {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", GROUPED),  # biases of q, k and v
    "qwen3": ("qwen3", GROUPED | {"head_dim": 32}),
    "mistral": ("mistral", GROUPED),
    "gemma": ("gemma", GROUPED | {"head_dim": 32}),
    "gpt2": ("gpt2", GPT2),  # matrices are [in, out]
    "gpt2 untied": ("gpt2", GPT2 | {"tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", WIDE),  # q, k and v of each head side by side; vLLM runs the model of transformers
    "gpt_bigcode": ("gpt_bigcode", GPT2),
    "gptj": ("gptj", GPT2 | {"rotary_dim": 16}),
    "opt": ("opt", WIDE),
    "opt with projections": ("opt", WIDE | {"word_embed_proj_dim": 32}),
    "phi": ("phi", WIDE),  # a bias of the head, which vLLM makes while it loads
    "bloom": ("bloom", {"hidden_size": 64, "n_head": 2}),  # q, k and v are reordered by the loader
    "falcon": ("falcon", WIDE),
    "falcon, new": ("falcon", WIDE | {"new_decoder_architecture": True, "num_kv_heads": 1}),
    "mixtral": ("mixtral", WIDE_EXPERTS),
    "qwen3_moe": ("qwen3_moe", WIDE_EXPERTS | {"moe_intermediate_size": 48}),  # padded by the kernel
}
# Of these CI runs the test: what is special in the others is special in how vLLM loads them.
IN_CI = ("llama tied", "gpt2", "qwen3_moe")
SAMPLE = [kind if kind in IN_CI else pytest.param(kind, marks=pytest.mark.proof) for kind in KINDS]
WIDE_STATES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
# For each type that people train: the type of its numbers in vLLM's kernels for the CPU, and settings that they need.
TYPES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    **dict.fromkeys(("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3"), (torch.float32, {})),
    **dict.fromkeys(("glm4", "glm4_moe", "gemma", "gemma2", "gemma3_text", "granite"), (torch.float32, {})),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "cohere", "gpt_oss", "llama"), (torch.float32, {})),
    "cohere2": (torch.float32, {"sliding_window": 64}),  # vLLM's window has one token more
    **dict.fromkeys(("lfm2", "lfm2_moe"), (torch.float32, {"conv_dim": 64, "block_dim": 64})),
    "qwen3_5_text": (torch.bfloat16, WIDE_STATES),
    "qwen3_5_moe_text": (torch.bfloat16, WIDE_STATES),
    "qwen3_next": (torch.bfloat16, WIDE_STATES),
}
CLOSE = 2e-6  # of log-probs in fp32
NOISE = 0.06  # in bf16, on average: where two experts are equally good, a single token may be further off
TOKENS = [3 + (7 * i) % 200 for i in range(24)]
# Log-probs in fp32 by other kernels. ALiBi of vLLM (bloom) is the worst, with 6e-5; other weights give more than 0.1.
SAME = 2e-4


@ray.remote(num_cpus=0.1, max_restarts=-1, runtime_env={"env_vars": engine_env("cpu")})
class Engines:
    """A process that builds one engine after the other; a crash of one does not end the others."""

    async def prove(self, folder: str, weights: list[dict[str, torch.Tensor]]):
        """Sync each weights; return what was read back, the scores of TOKENS, and the tensors of which one changed
        number is not noticed."""
        dtype = str(next(iter(weights[0].values())).dtype).removeprefix("torch.")
        engine = Engine(EngineSpec(folder, dtype, "cpu", 64, 0, VLLMConfig(kv_cache_mb=8), load_weights=False))
        reports, scores = [], []
        for version, tensors in enumerate(weights, 1):
            reports.append(await sync(engine, version, tensors))
            scores += await engine.score([TOKENS])
        missed = [name for name in weights[-1] if not await notices(engine, weights[-1], name)]
        await engine.close()
        return reports, scores, missed

    async def refusal(self, folder: str, weights: dict[str, torch.Tensor]) -> str:
        """Return why an engine does not take the weights."""
        engine = Engine(EngineSpec(folder, "float32", "cpu", 64, 0, VLLMConfig(kv_cache_mb=8), load_weights=False))
        with pytest.raises(WeightSyncError) as raised:
            await sync(engine, 1, weights)
        await engine.close()
        return str(raised.value)


async def sync(engine: Engine, version: int, weights: dict[str, torch.Tensor]):
    sender = ShmSender(next(iter(weights.values())).dtype, check=True)
    try:
        return await engine.update_weights(sender.send(version, weights.items()))
    finally:
        sender.release()


async def notices(engine: Engine, weights: dict[str, torch.Tensor], name: str) -> bool:
    """Whether the attestation names the tensor when the engine has other weights than it was sent: one number in the
    middle of this tensor is another one."""
    changed = weights[name].clone()
    changed.view(-1)[changed.numel() // 2] += 1e-3 if changed.dtype == torch.float32 else 1.0  # bf16 has few digits
    await sync(engine, 8, weights)
    sent = await remembered(engine)
    await sync(engine, 9, weights | {name: changed})
    await remembered(engine, sent)
    try:
        await engine.attest()
    except WeightSyncError as error:
        return f"tensor {name} " in str(error) and "after loading" in str(error)
    return False


async def remembered(engine: Engine, other=None):
    """What the engine takes for the last sync; `other` takes its place."""

    def swap(worker):
        transfer = worker.weight_transfer_engine
        transfer.loads, kept = other or transfer.loads, transfer.loads
        return kept

    return (await engine._call(lambda core: core.collective_rpc(swap)))[0]


@pytest.fixture(scope="module")
def engines(cluster):
    return Engines.remote()


def make(folder: Path, kind: str, seed: int):
    family, settings = KINDS[kind]
    families.make(folder, family, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * 0.08 + (parameter.dim() == 1) * 0.5
    return model


@torch.no_grad()
def scores_of(model) -> np.ndarray:
    ids = torch.tensor([TOKENS])
    taken = torch.log_softmax(model(ids).logits[0].float(), -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], taken.numpy()])


@pytest.mark.parametrize("kind", SAMPLE)
def test_every_tensor_of_a_kind_is_proved_in_the_engine(engines, kind, tmp_path):
    models = [make(tmp_path, kind, seed) for seed in (1, 2)]
    weights = [dict(iterate_merged(model)) for model in models]
    reports, scores, missed = ray.get(engines.prove.remote(str(tmp_path), weights), timeout=300)
    assert [report.not_readable for report in reports] == [(), ()]
    assert [report.read_back for report in reports] == [len(weights[0])] * 2
    for model, found in zip(models, scores, strict=True):
        assert np.abs(found - scores_of(model)).max() < SAME
    assert missed == []


@pytest.mark.proof
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_has_the_numbers_of_the_trainer_after_each_sync(engines, kind, tmp_path):
    dtype, settings = TYPES[kind]
    families.make_typed(tmp_path, kind, **(WIDE_EXPERTS | settings))
    models = [shifted(tmp_path, seed) for seed in (1, 2)]
    weights = [{name: tensor.to(dtype) for name, tensor in iterate_merged(model)} for model in models]
    reports, scores, missed = ray.get(engines.prove.remote(str(tmp_path), weights), timeout=300)
    assert [report.not_readable for report in reports] == [(), ()]
    assert [report.read_back for report in reports] == [len(weights[0])] * 2
    for model, scored in zip(models, scores, strict=True):
        errors = np.abs(scored - scores_of(model.to(dtype)))
        assert errors.max() < CLOSE if dtype == torch.float32 else errors.mean() < NOISE, errors
    assert missed == []


def shifted(folder: Path, seed: int):
    """The model of a folder with other weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(kind, marks=pytest.mark.proof) for kind in ("llama tied", "gemma"))]
)
def test_a_head_that_an_adapter_has_untied_is_refused(engines, kind, tmp_path):
    """vLLM ignores it: its head would stay the embedding."""
    weights = dict(iterate_merged(make(tmp_path, kind, 1)))
    embedding = next(tensor for name, tensor in weights.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    found = ray.get(engines.refusal.remote(str(tmp_path), weights | {"lm_head.weight": embedding.clone()}), timeout=300)
    assert "tensor lm_head.weight has no place" in found and "ds.lora.target_modules" in found
