"""`rollout` and `vllm`: how much is sampled each step and how, and the engines that sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_suite.config.declarations.conditions import ON_GPUS, Need, is_false, is_null, is_one_of, is_positive, is_true
from rlhf_suite.config.declarations.flags import FIXED, FREE, SHAPE, flag
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import LOOPS, RL

SAMPLED = is_null(".replay")  # in a task that has this flag
# Training divides by the temperature.
OF_POLICY: Any = {"ge": 0.01, "help": "Sampling temperature; training log-probs use it too"}
# Methods of vLLM that need nothing but the weights; others read checkpoints that are quantised already.
QUANTIZATIONS = ("fp8", "fp8_per_channel", "fp8_per_block", "mxfp8", "int8_per_channel_weight_only")


@dataclass
class RolloutConfig(Section):
    """Sampling: how much and how, in task=ppo of what is trained on"""

    n_samples_per_prompt: int = flag(
        1,
        "Samples per prompt (the group)",
        ge=1,
        needs=Need(is_positive(".temperature", "1"), "the samples at temperature 0 would all be the same"),
        defaults=dict.fromkeys(LOOPS, 8),
    )
    max_new_tokens: int | None = flag(None, ge=1)
    """Longest response in tokens; null: what the prompt leaves of data.max_len"""
    temperature: float = flag(
        1.0, "Sampling temperature; 0: always the likeliest token", ge=0, le=2, of_tasks=dict.fromkeys(RL, OF_POLICY)
    )
    top_p: float = flag(1.0, gt=0, le=1, when=SAMPLED)
    """Sample among the likeliest tokens that together have this probability (nucleus sampling)"""
    top_k: int = flag(-1, "Sample among the k most likely tokens; -1: all", ge=-1, when=SAMPLED)
    min_p: float = flag(0.0, ge=0, lt=1, when=SAMPLED)
    """Drop tokens below this share of the most likely one's probability"""
    repetition_penalty: float = flag(1.0, gt=0, when=SAMPLED)
    """Make tokens that are in the prompt or the response already less likely: their logits are divided by this if they
    are above 0, else multiplied (Keskar et al. 2019). 1: off"""
    stop: list[str] | None = flag(None, "Strings that end a response; they are kept in it", when=SAMPLED)
    seed: int = flag(42, tasks=("generate", *LOOPS))
    """Seed; the random numbers of a sample depend only on it, the prompt's row and the sample's number"""
    replay: str | None = flag(None, resume=FIXED, tasks=RL)
    """Folder of a run of task=ppo: its rollouts, with their rewards, are trained on in place of new ones. No engine is
    started, and nothing is sampled or scored"""
    batch_size: int = flag(1024, "Prompts per RL step", ge=1, tasks=RL)
    vllm_generate_batch_size: int | None = flag(None, ge=1, when=SAMPLED, tasks=RL)
    """Prompts per round of sampling; null: rollout.batch_size. Groups that a step has no room for wait for later steps.
    With train.partial_rollout_enable and no filter: what is above rollout.batch_size is under way too"""
    token_entropy: bool = flag(False, tasks=RL)
    """Compute the entropy of the policy at each token before the update, for the rollout files and the report. An
    estimator that needs entropies has them anyway"""
    micro_batch_size: int | None = flag(None, ge=1, resume=SHAPE, tasks=RL)
    """Sequences per forward pass over a rollout; null: as many as the token budget has space for"""
    max_tokens_per_gpu: int | None = flag(
        None, ge=1, resume=SHAPE, when=is_null(".micro_batch_size") | is_true("train.dynamic_batch_enable"), tasks=RL
    )
    """Token budget of a forward pass over a rollout; null: train.max_tokens_per_gpu"""


@dataclass
class VLLMConfig(Section):
    """vLLM engines, one Ray actor each; in task=ppo they follow the model in training"""

    num_engines: int = flag(1, "Number of engines", ge=1, resume=FREE)
    tensor_parallel_size: int = flag(1, "Devices that each hold a part of every layer of an engine", ge=1, resume=SHAPE)
    pipeline_parallel_size: int = flag(1, ge=1, resume=SHAPE)
    """Groups of vllm.tensor_parallel_size devices that each hold a part of the layers of an engine"""
    gpu_memory_utilization: float | None = flag(None, gt=0, le=1, resume=FREE)
    """Share of the GPU's memory for an engine; null: 0.9, or 0.4 with train.colocate_all"""
    kv_cache_mb: int | None = flag(None, ge=1, resume=FREE)
    """KV cache in MiB; null: from gpu_memory_utilization on GPU, 64 on CPU"""
    max_restarts: int = flag(3, ge=0, resume=FREE)
    """Times that each engine is started again when its process dies; its unfinished requests are made again. 0: the run
    ends. Above 0 the weights of the last sync stay in host memory where the trainer may have newer ones"""
    max_num_seqs: int | None = flag(None, ge=1)
    """Sequences that an engine runs at once; null: vLLM's own number for a GPU (1,024 on large ones), 256 on a CPU"""
    enforce_eager: bool = flag(False, "Do not use CUDA graphs (always so on CPU)")
    enable_prefix_caching: bool | None = flag(None)
    """Share the KV cache of equal prefixes; it is emptied at every weight sync. perf/prefix_cache_hits is the share of
    the tokens of all prompts that were in it. null: true on GPUs"""
    quantization: str | None = flag(
        None,
        choices=QUANTIZATIONS,
        needs=Need(is_one_of("ds.param_dtype", "bf16"), "weights of bf16 alone are quantised"),
    )
    """How engines quantise the weights of linear layers that they load (int8: of experts alone); null: not at all. RL
    needs a correction for it and algo.mismatch_max (docs/rl_engines.md)"""
    speculative_config: dict[str, Any] = flag({})
    """Speculative decoding by vLLM's settings: {method: ngram, num_speculative_tokens: 3}, or method draft_model with
    the model that guesses. Samples have the distribution that they have without it; engine/acceptance is the share of
    guesses that are kept"""
    engine_args: dict[str, Any] = flag({})
    """Further arguments of vLLM's EngineArgs by name, such as {enable_expert_parallel: true}; arguments that the suite
    decides are refused"""
    enable_sleep: bool = flag(
        False,
        resume=SHAPE,
        needs=Need(
            is_true("train.colocate_all"),
            "an engine that shares no GPU has no reason to sleep",
            fix="write vllm.enable_sleep=false, or train.colocate_all=true",
        ),
        tasks=RL,
    )
    """Free the engine's GPU memory while training"""
    sync_backend: str = flag(
        "auto",
        choices=("auto", "shm", "gloo", "nccl", "ipc"),
        resume=SHAPE,
        needs=(
            Need(is_true("train.colocate_all"), "ipc needs trainer and engine on the same GPU", is_one_of("", "ipc")),
            Need(
                is_false("train.colocate_all"),
                "nccl does not connect trainer and engine on the same GPU",
                is_one_of("", "nccl"),
            ),
            Need(ON_GPUS, "it sends from GPU to GPU", is_one_of("", "nccl", "ipc")),
        ),
        tasks=RL,
    )
    """How weights are sent to the engines: shm (one node), gloo, nccl, ipc (same GPU)"""
    sync_check: str = flag("full", choices=("off", "digest", "full"), tasks=RL)
    """How each weight sync is verified: a digest of every tensor; full: also log-probs of a probe, but not
    with images (data.image_key), of which the log-probs of rollouts are compared alone"""
    sync_adapters: bool = flag(True, resume=SHAPE, when=is_positive("ds.lora.rank", "<rank>"), tasks=RL)
    """With LoRA: engines hold the base model, and a sync brings them the adapters alone where vLLM can apply them.
    false: it brings the whole weights with adapters merged, with which engines generate faster"""

    @property
    def devices(self) -> int:
        """The devices of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


CPU_SEQUENCES, GPU_SEQUENCES = 256, 1024  # that vllm.max_num_seqs=null stands for; vLLM takes fewer on small GPUs


def most_sequences(config: VLLMConfig, device: str) -> int:
    """Return the most sequences that an engine runs at once."""
    return config.max_num_seqs or (GPU_SEQUENCES if device == "cuda" else CPU_SEQUENCES)
