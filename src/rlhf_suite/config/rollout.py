"""`rollout` and `vllm`: how much is sampled each step and how, and the engines that sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_suite.config.flags import FREE, flag, is_true
from rlhf_suite.config.problems import Problem, rule

if TYPE_CHECKING:
    from rlhf_suite.config.runs import GenerateRun, PPORun, SamplingRun


@dataclass
class SamplingConfig:
    """Sampling"""

    n_samples_per_prompt: int = flag(1, "Samples per prompt (the group)", ge=1)
    max_new_tokens: int | None = flag(
        None, "Longest response in tokens; null: what the prompt leaves of data.max_len", ge=1
    )
    temperature: float = flag(1.0, "Sampling temperature; 0: always the likeliest token", ge=0)
    top_p: float = flag(
        1.0, "Sample among the likeliest tokens that together have this probability (nucleus sampling)", gt=0, le=1
    )
    top_k: int = flag(-1, "Sample among the k most likely tokens; -1: all", ge=-1)
    min_p: float = flag(0.0, "Drop tokens below this share of the most likely one's probability", ge=0, lt=1)
    stop: list[str] | None = flag(None, "Strings that end a response; they are kept in it")


@dataclass
class GenerationConfig(SamplingConfig):
    """Sampling, of the same tokens every time"""

    seed: int = flag(
        42,
        "Seed; the random numbers of a sample depend only on it, the prompt's row and the sample's number",
    )


@dataclass
class RolloutConfig(SamplingConfig):
    """Sampling of what is trained on"""

    batch_size: int = flag(1024, "Prompts per RL step", ge=1)
    vllm_generate_batch_size: int | None = flag(
        None,
        "Prompts per round of sampling; null: rollout.batch_size",
        ge=1,
        when=is_true("algo.dynamic_filtering_enable"),
    )
    temperature: float = flag(1.0, "Sampling temperature; training log-probs use it too", gt=0)
    micro_batch_size: int = flag(1, "Sequences per forward pass over a rollout", ge=1)
    max_tokens_per_gpu: int | None = flag(
        None,
        "Token budget of a forward pass; null: train.max_tokens_per_gpu",
        ge=1,
        when=is_true("train.dynamic_batch_enable"),
    )


@dataclass
class EngineConfig:
    """vLLM engines, one Ray actor each"""

    num_engines: int = flag(1, "Number of engines", ge=1, resume=FREE)
    tensor_parallel_size: int = flag(1, "GPUs per engine", ge=1)
    gpu_memory_utilization: float | None = flag(
        None,
        "Share of the GPU's memory for an engine; null: 0.9, or 0.4 with train.colocate_all",
        gt=0,
        le=1,
        resume=FREE,
    )
    kv_cache_mb: int | None = flag(
        None, "KV cache in MiB; null: from gpu_memory_utilization on GPU, 64 on CPU", ge=1, resume=FREE
    )
    max_num_seqs: int = flag(256, "Sequences that an engine runs at once", ge=1)
    enforce_eager: bool = flag(False, "Do not use CUDA graphs (always so on CPU)")
    enable_prefix_caching: bool = flag(
        False, "Share the KV cache of equal prefixes; it is emptied at every weight sync"
    )


@dataclass
class VLLMConfig(EngineConfig):
    """vLLM engines that follow a model in training"""

    enable_sleep: bool = flag(
        False,
        "Free the engine's GPU memory while training",
        when=is_true("train.colocate_all"),
        strict="an engine that shares no GPU has no reason to sleep",
    )
    sync_backend: str = flag(
        "auto",
        "How weights are sent to the engines: shm (one node), gloo, nccl, ipc (same GPU)",
        choices=("auto", "shm", "gloo", "nccl", "ipc"),
    )
    sync_check: str = flag(
        "full",
        "How each weight sync is verified: a digest of every tensor; full: also log-probs of a probe",
        choices=("off", "digest", "full"),
    )


@rule
def room_for_a_prompt(run: SamplingRun) -> Iterator[Problem]:
    new = run.rollout.max_new_tokens
    if new is not None and new >= run.data.max_len:
        what = f"{new} leaves no room for a prompt in data.max_len={run.data.max_len}"
        yield Problem("rollout.max_new_tokens", what, f"write less than {run.data.max_len}, or raise data.max_len")


@rule
def sampling_is_unchanged(run: PPORun) -> Iterator[Problem]:
    """Refuse truncated sampling: it draws from another distribution than the one whose log-probs are trained."""
    rollout = run.rollout
    for name, value, neutral in (
        ("top_p", rollout.top_p, 1.0),
        ("top_k", rollout.top_k, -1),
        ("min_p", rollout.min_p, 0.0),
    ):
        corrected = run.algo.advantage.is_correction_level != "off"
        if value != neutral and not (corrected and run.algo.mismatch_max is not None):
            key = f"rollout.{name}"
            what = f"{value} cuts tokens off, and the trainer's log-probs would not be those of the samples"
            fix = (
                f"write {key}={neutral}, or correct for it (correction=tis) and say with algo.mismatch_max=<nats> how "
                "far they may differ"
            )
            yield Problem(key, what, fix)


@rule
def engines_fit(run: PPORun) -> Iterator[Problem]:
    vllm = run.vllm
    if vllm.sync_backend == "ipc" and not run.train.colocate_all:
        what = "ipc needs trainer and engine on the same GPU"
        yield Problem("vllm.sync_backend", what, "write vllm.sync_backend=auto, or add train.colocate_all=true")
    if run.launch.device == "cpu" and vllm.sync_backend in ("nccl", "ipc"):
        what = f"{vllm.sync_backend} needs GPUs (launch.device=cpu)"
        yield Problem("vllm.sync_backend", what, "write vllm.sync_backend=auto")


@rule
def engines_are_whole(run: SamplingRun) -> Iterator[Problem]:
    if run.launch.device == "cpu" and run.vllm.tensor_parallel_size > 1:
        what = "engines on a CPU are not split (launch.device=cpu)"
        yield Problem(
            "vllm.tensor_parallel_size", what, "write vllm.tensor_parallel_size=1, and raise vllm.num_engines"
        )


@rule
def samples_differ(run: GenerateRun) -> Iterator[Problem]:
    if run.rollout.temperature == 0 and run.rollout.n_samples_per_prompt > 1:
        what = f"{run.rollout.n_samples_per_prompt} samples at rollout.temperature=0 would all be the same"
        fix = "write rollout.temperature=1, or rollout.n_samples_per_prompt=1"
        yield Problem("rollout.n_samples_per_prompt", what, fix)
