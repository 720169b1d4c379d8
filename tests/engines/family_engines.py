"""Engines of tiny models: weights are synced twice, and the log-probs of what is sampled are compared with the
trainer's. The reference is computed in another process than that of vLLM, which changes some models of transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM

import families
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.data.generation import GenerationRequest, SamplingSettings
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.spec import AdapterSpec, EngineSpec
from rlhf_suite.engines.start import engine_env
from rlhf_suite.models.adapters import adapted_modules, iterate_adapters
from rlhf_suite.models.forward import LanguageModel
from rlhf_suite.models.load import load_model
from rlhf_suite.models.lora import add_lora
from rlhf_suite.models.weights import iterate_merged, iterate_weights
from rlhf_suite.weight_sync.digests import ADAPTER, BASE, WHOLE, WeightSyncError
from rlhf_suite.weight_sync.sender import ShmSender

TOKENS, NEW = [3 + (7 * i) % 200 for i in range(24)], 16
# Heads of 32 dimensions, which the CPU kernels have.
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
# Of log-probs in fp32: their mean, and the largest; a log-prob of 8 is rounded by 5e-7. States of layers add up what
# was rounded before.
MEAN, LARGEST, OF_STATES = 1e-6, 5e-6, 2
NOISE = 0.06  # in bf16, on average: where two experts are equally good, a single token may be further off
RANK = 4
Syncs = list[tuple[str, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Served:
    """What vLLM's kernels without a GPU need of a type."""

    settings: dict[str, Any] = field(default_factory=dict)  # beside those of `HEADS`
    dtype: torch.dtype = torch.float32
    note: str = ""


STATES = Served(
    {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    torch.bfloat16,
    "the mean in bf16, which the kernels need",
)
CONVOLUTIONS = Served({"conv_dim": 64, "block_dim": 64})
PLAIN = (
    *("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "phi3"),
    *("olmo2", "olmo3", "glm4", "glm4_moe", "gemma", "gemma2", "gemma3_text", "granite", "granitemoe"),
    *("granitemoehybrid", "cohere", "gpt_oss"),
)
# The types that engines without a GPU serve.
SERVED: dict[str, Served] = dict.fromkeys(PLAIN, Served()) | {
    "cohere2": Served({"sliding_window": 64}, note="in windows, of which vLLM's have one token more, texts that fit"),
    "deepseek_v3": Served(
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "kv_lora_rank": 512}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    ),
    "gemma4_text": Served({"global_head_dim": 32}),
    "llama4_text": Served(
        {"num_experts_per_tok": 1, "attention_chunk_size": 32}, note="one expert per token, and chunks of whole blocks"
    ),
    "nemotron_h": Served(
        {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]}, note="without experts, which are refused"
    ),
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "qwen3_5_text": STATES,
    "qwen3_5_moe_text": STATES,
    "qwen3_next": STATES,
}


@ray.remote(num_cpus=0.1, max_restarts=-1, runtime_env={"env_vars": engine_env("cpu")})
class Engines:
    """A process that builds one engine after the other; a crash of one does not end the others."""

    async def prove(self, folder: str, syncs: Syncs, adapter: AdapterSpec | None = None, damages: bool = False):
        """Make each sync; return what was read back; for each sync with all weights the tokens of a text, of which the
        engine has sampled the last ones, and their log-probs; and the tensors of which one changed number is not
        noticed. An engine that takes no adapter gets nothing."""
        engine = Engine(spec(folder, syncs[0][1], adapter))
        if adapter is not None and not (await engine.ready()).takes_adapter:
            await engine.close()
            return [], [], []
        reports, texts = [], []
        for version, (part, tensors) in enumerate(syncs, 1):
            reports.append(await sync(engine, version, tensors, part))
            texts += [await sample(engine)] if part != BASE else []
        weights = syncs[-1][1] if damages else {}
        missed = [name for name in weights if not await notices(engine, weights, name)]
        await engine.close()
        return reports, texts, missed

    async def refusal(self, folder: str, weights: dict[str, torch.Tensor]) -> str:
        """Return why an engine does not take the weights."""
        engine = Engine(spec(folder, weights))
        try:
            await sync(engine, 1, weights)
        except WeightSyncError as error:
            return str(error)
        finally:
            await engine.close()
        raise AssertionError("the engine took the weights")


def spec(folder: str, weights: dict[str, torch.Tensor], adapter: AdapterSpec | None = None) -> EngineSpec:
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    return EngineSpec(
        folder, dtype, "cpu", 64, 0, VLLMConfig.of("ppo", kv_cache_mb=8), load_weights=False, adapter=adapter
    )


async def sync(engine: Engine, version: int, weights: dict[str, torch.Tensor], part: str = WHOLE):
    sender = ShmSender(next(iter(weights.values())).dtype, check=True)
    try:
        return await engine.update_weights(sender.send(version, weights.items(), part))
    finally:
        sender.release()


async def sample(engine: Engine) -> tuple[list[int], np.ndarray]:
    """Return the tokens of a prompt and of what an engine has sampled after it, and their log-probs."""
    (scores,) = await engine.score([TOKENS])
    await engine.submit("test", [(0, GenerationRequest(0, TOKENS, NEW, 0, SamplingSettings()))])
    ((_, answer),) = await engine.wait_for_finished("test")
    return [*TOKENS, *answer.ids.tolist()], np.concatenate([scores, answer.log_probs])


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


@torch.no_grad()
def differences(model: Any, text: tuple[list[int], np.ndarray]) -> np.ndarray:
    """Return how far the log-probs of a text are from those of a model of transformers, [T]."""
    ids, log_probs = torch.tensor([text[0]]), text[1]
    taken = torch.log_softmax(model(ids).logits[0].float(), -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return np.abs(np.concatenate([[0.0], taken.numpy()]) - log_probs)


def shifted(folder: Path, seed: int):
    """Return the model of a folder with other weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def weight_errors(engines: Any, folder: Path, kind: str, damages: bool = False) -> tuple[list[np.ndarray], list[str]]:
    """Return how far the log-probs of a type are off after each of two syncs, and the tensors of which a
    changed number is not noticed. Every tensor is read back."""
    served = SERVED[kind]
    families.make_typed(folder, kind, **(HEADS | served.settings))
    models = [shifted(folder, seed) for seed in (1, 2)]
    syncs = [(WHOLE, {name: t.to(served.dtype) for name, t in iterate_merged(model)}) for model in models]
    reports, texts, missed = ray.get(engines.prove.remote(str(folder), syncs, damages=damages), timeout=400)
    check_read_back(reports, syncs)
    return [differences(model.to(served.dtype), text) for model, text in zip(models, texts, strict=True)], missed


def adapter_errors(engines: Any, folder: Path, kind: str) -> tuple[list[np.ndarray], str]:
    """Return how far the log-probs of a type with an adapter that the engine applies are off after each of two syncs,
    and why it does not apply any."""
    served = SERVED[kind]
    families.make_typed(folder, kind, **(HEADS | served.settings))
    names, problem = adapted_modules(str(folder), "", DeepSpeedConfig.of("sft", lora=LoRAConfig(rank=RANK)))
    if problem is not None:
        return [], problem
    models = [adapted(folder, seed, served.dtype) for seed in (1, 2)]
    syncs = [(BASE, dict(iterate_weights(models[0], merges=False)))]
    syncs += [(ADAPTER, {name: t.clone() for name, t in iterate_adapters(model.model)}) for model in models]
    syncs = [(part, {name: tensor.to(served.dtype) for name, tensor in sent.items()}) for part, sent in syncs]
    adapter = AdapterSpec(RANK, tuple(sorted({name.rpartition(".")[2] for name in names})))
    reports, texts, _ = ray.get(engines.prove.remote(str(folder), syncs, adapter), timeout=400)
    if not reports:
        return [], "vLLM without a GPU takes no adapters of this model"
    check_read_back(reports, syncs)
    return [differences(model.model, text) for model, text in zip(models, texts, strict=True)], ""


def adapted(folder: Path, seed: int, dtype: torch.dtype) -> LanguageModel:
    """Return the model of a folder with adapters that are not zero, and differ by seed."""
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    ds = DeepSpeedConfig.of("sft", param_dtype=name, packing_samples=False, attn_implementation="eager")
    model = load_model(str(folder), head="lm", ds=ds)
    add_lora(model, LoRAConfig(rank=RANK), seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return model.to(dtype).eval()


def check_read_back(reports: list[Any], syncs: Syncs) -> None:
    assert [report.not_readable for report in reports] == [()] * len(syncs)
    assert [report.read_back for report in reports] == [len(weights) for _, weights in syncs]
