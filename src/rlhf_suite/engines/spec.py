"""The settings of a rollout engine and what it says of itself: plain values, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.config.declarations.rollout import VLLMConfig

CPU_KV_CACHE_MB = 64  # by default vLLM takes most of the machine's memory and spends half a minute zeroing it
CPU_BATCHED_TOKENS = 2048  # tokens of one step; a prompt must fit into a step
GPU_MEMORY_ALONE = 0.9  # the share of GPU memory for an engine that has the GPU for itself
Likeliest = tuple[NDArray[np.int32], NDArray[np.float32]]  # tokens and their log-probs, [places, k] each


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter that an engine gets beside the weights of the model."""

    rank: int
    modules: tuple[str, ...]  # the last parts of the names of the modules that it changes


@dataclass(frozen=True)
class EngineSpec:
    """The settings that an engine is started with."""

    model: str  # folder with config.json, and the weights when `load_weights`
    dtype: str  # "float32" or "bfloat16"
    device: str  # "cpu" or "cuda"
    max_len: int  # prompt plus response, in tokens
    seed: int
    vllm: VLLMConfig
    sync_backend: str = "shm"  # or "gloo", "nccl", "ipc": vllm.sync_backend with "auto" resolved
    load_weights: bool = True  # False: random weights until the first sync
    enable_sleep: bool = False  # free the GPU memory on request
    discards_weights: bool = False  # while it sleeps, since a sync brings all of them
    image_token: int | None = None  # the placeholder of images; None: there are none
    max_images: int = 0  # of a request
    adapter: AdapterSpec | None = None  # None: its weights come with adapters merged
    returns_routes: bool = False  # of tokens whose log-probs are asked for
    kv_blocks: int | None = None  # of the engine whose place it takes; None: it is the first one there
    detokenize: bool = False  # needs a tokenizer in `model`; required by SamplingSettings.stop


@dataclass(frozen=True)
class EngineInfo:
    """The properties of a running engine."""

    startup_s: float
    num_workers: int  # processes that hold weights: one for each device
    kv_blocks: int  # of the KV cache
    kv_tokens: int  # that fit in them
    node: str  # address of the node it runs on
    takes_adapter: bool = False  # whether it gets an adapter beside the weights of the model
    caches_prefixes: bool = False  # whether prompts that begin alike share their keys and values


def sleep_level(spec: EngineSpec) -> int | None:
    """Return the level of vLLM's sleep: 1 moves the weights to host memory, 2 discards them; None: there is none."""
    if not (spec.enable_sleep and spec.device == "cuda"):
        return None
    return 2 if spec.discards_weights else 1


def caches_prefixes(config: VLLMConfig, device: str) -> bool:
    """Return whether engines on this kind of device share the keys and values of prompts that begin alike."""
    return device == "cuda" if config.enable_prefix_caching is None else config.enable_prefix_caching
