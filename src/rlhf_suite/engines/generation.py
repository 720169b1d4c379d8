"""What goes into a rollout engine and what comes out: plain values that cross processes, no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.config.rollout import SamplingConfig
from rlhf_suite.config.vllm import EngineConfig


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn. The same object may serve every request of a rollout."""

    temperature: float = 1.0  # 0: the most likely token; its log-prob is then that of temperature 1 (evaluation only)
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # strings; the tokens that make up the string stay at the end of the response
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids; the id stays at the end of the response
    log_probs: bool = True  # measure each token's log-prob

    @classmethod
    def of(cls, config: SamplingConfig, temperature: float, stop_ids: Sequence[int]) -> SamplingSettings:
        """The flags of `rollout` at a given temperature."""
        return cls(
            temperature=temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop=tuple(config.stop or ()),
            stop_token_ids=tuple(stop_ids),
        )


@dataclass(frozen=True)
class GenerationRequest:
    """One sample to draw. A group of n samples is n requests, each with its own seed."""

    id: int
    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int
    sampling: SamplingSettings


def sample_seed(*entropy: int) -> int:
    """A seed that depends on these numbers alone."""
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint32)[0])


@dataclass(frozen=True)
class Generation:
    """One response of n tokens."""

    id: int
    ids: NDArray[np.int32]  # [n]
    # [n], under the temperature and, with top_p/top_k/min_p, over the kept tokens; [0] with log_probs=False
    log_probs: NDArray[np.float32]
    finish_reason: str  # "stop" or "length"
    versions: NDArray[np.int32]  # [n], the weights that produced each token; they differ when a sync fell in between

    @property
    def weight_version(self) -> int:
        """The oldest weights that had a part in it."""
        return int(self.versions.min())


@dataclass(frozen=True)
class EngineSpec:
    """Everything an engine needs to know at birth."""

    model: str  # folder with config.json, and the weights when `load_weights`
    dtype: str  # "float32" or "bfloat16"
    device: str  # "cpu" or "cuda"
    max_len: int  # prompt plus response, in tokens
    seed: int
    vllm: EngineConfig
    sync_backend: str = "shm"  # or "gloo", "nccl", "ipc": vllm.sync_backend with "auto" resolved
    load_weights: bool = True  # False: random weights until the first sync
    enable_sleep: bool = False  # give the GPU's memory away on demand
    detokenize: bool = False  # needs a tokenizer in `model`; required by SamplingSettings.stop


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says of itself once it is up."""

    startup_s: float
    num_workers: int  # processes that hold weights: tensor_parallel_size
    kv_tokens: int  # tokens that fit in the KV cache
    node: str  # address of the node it runs on
