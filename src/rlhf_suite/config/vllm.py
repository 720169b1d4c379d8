"""`vllm`: the rollout engines and how they get the weights."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import FREE, flag


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
    max_num_seqs: int = flag(256, "Sequences an engine runs at once", ge=1)
    enforce_eager: bool = flag(False, "No CUDA graphs (always so on CPU)")
    enable_prefix_caching: bool = flag(False, "Share the KV of equal prefixes; reset at every weight sync")


@dataclass
class VLLMConfig(EngineConfig):
    """vLLM engines that follow a model in training"""

    enable_sleep: bool = flag(False, "Free the engine's GPU memory while training (train.colocate_all)")
    sync_backend: str = flag(
        "auto",
        "How weights travel: shm (one node), gloo, nccl, ipc (same GPU)",
        choices=("auto", "shm", "gloo", "nccl", "ipc"),
    )
    sync_check: str = flag(
        "full",
        "Attestation of each sync: digest of every tensor, full adds a log-prob probe",
        choices=("off", "digest", "full"),
    )
