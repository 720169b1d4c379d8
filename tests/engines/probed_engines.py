"""Engines whose weights a test can read and damage, their models, and requests to them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import psutil
import ray
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.data.generation import GenerationRequest, SamplingSettings
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.engines.start import engine_env
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.weight_sync.sender import ShmSender, StreamSender

VOCAB, EOS, MAX_LEN = 64, 1, 128
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
    "eos_token_id": EOS,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
# With two workers both hold the one key/value head; the vocabulary ends in the middle of the second worker's rows.
SPLIT = SHAPE | {"vocab_size": 70, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS = {
    "split": Qwen2Config(tie_word_embeddings=True, **SPLIT),
    "tied": Qwen3Config(tie_word_embeddings=True, **SHAPE),
    "experts": Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **SHAPE),
}
PROMPT = [3 + (7 * i) % 60 for i in range(40)]  # longer than one block of the prefix cache


class ProbedEngine(Engine):
    """An engine whose weights a test can read and damage."""

    async def rss(self) -> int:
        return psutil.Process().memory_info().rss

    async def perturb(self, name: str) -> None:
        def change(model):
            parameter = model.get_parameter(name)
            parameter.data[-1] += 1e-3

        await self._call(lambda engine: engine.apply_model(change))

    async def perturb_last_worker(self, name: str) -> None:

        def change(worker):
            if worker.rank == worker.parallel_config.world_size - 1:
                worker.get_model().get_parameter(name).data[0] += 1e-3

        await self._call(lambda engine: engine.collective_rpc(change))

    async def workers(self) -> list[int]:
        return await self._call(lambda engine: engine.collective_rpc(lambda worker: os.getpid()))

    async def places(self) -> list[str]:
        """The node of each worker."""
        return await self._call(
            lambda engine: engine.collective_rpc(lambda worker: ray.get_runtime_context().get_node_id())
        )

    async def names_of_memory(self) -> list[str]:
        """What vLLM calls the memory through which workers of one machine may sum."""
        return await self._call(lambda engine: engine.collective_rpc(lambda worker: os.environ["VLLM_DIST_IDENT"]))

    async def without_head_cure(self) -> None:
        from rlhf_suite.weight_sync import receiver as weight_sync

        weight_sync.repack_heads = lambda model: None


@ray.remote(num_cpus=0.1)
class Trainer:
    """A trainer process with nothing but a stream."""

    def __init__(self) -> None:
        self.sender = StreamSender("gloo", torch.float32, True, "127.0.0.1", 60)

    def port(self) -> int:
        return self.sender.port

    def connect(self, world_size: int, meeting: int) -> None:
        self.sender.connect(world_size, meeting)

    def publish(self, version: int, weights: dict[str, torch.Tensor]):
        return self.sender.send(version, weights.items())


def make_model(kind: str, seed: int):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.08 + (parameter.dim() == 1)
    return model


def checkpoint(model):
    """(name, tensor) as a checkpoint has them; a tied head is not in it."""
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            yield from revert_weight_conversion(model, {name: tensor}).items()


@torch.no_grad()
def log_probs_of(model, ids, temperature: float = 1.0) -> np.ndarray:
    """log p of each token given those before it, [T]; 0 for the first."""
    ids = torch.tensor([list(ids)])
    logits = model(ids).logits[0] / temperature
    taken = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], taken.numpy()])


def requests(count: int, tokens: int = 20, seed: int = 0, prompt=PROMPT, **sampling) -> list[GenerationRequest]:
    settings = SamplingSettings(**sampling)
    return [GenerationRequest(i, [*prompt[:-1], 3 + i % 50], tokens, seed + i, settings) for i in range(count)]


def gap(model, asked, answers, temperature: float = 1.0) -> float:
    """Mean |log-prob of the engine - of the model| over all sampled tokens."""
    errors = []
    for request, answer in zip(asked, answers, strict=True):
        full = log_probs_of(model, [*request.prompt_ids, *answer.ids.tolist()], temperature)
        errors.append(np.abs(full[len(request.prompt_ids) :] - answer.log_probs))
    return float(np.concatenate(errors).mean())


def sync(pool: EnginePool, model, version: int):
    sender = ShmSender(torch.float32, check=True)
    try:
        return pool.update_weights(sender.send(version, checkpoint(model)))[0]
    finally:
        sender.release()


def start(
    folder: Path, name: str, kind: str, config: VLLMConfig, backend: str = "shm", timeout_s: float = 120, **spec
) -> EnginePool:
    tested = ray.remote(ProbedEngine).options(num_cpus=0.1, runtime_env={"env_vars": engine_env("cpu")})
    member = Member(name, folder / f"{name}.log")
    spec = EngineSpec(str(folder / kind), "float32", "cpu", MAX_LEN, 0, config, backend, **spec)
    return EnginePool([tested.remote(spec, member.log)], [member], timeout_s)


def save_tokenizer(folder: Path) -> None:
    """One letter or digit per id."""
    letters = ["<pad>", "<eos>", "<bos>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"][:VOCAB]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find this file
