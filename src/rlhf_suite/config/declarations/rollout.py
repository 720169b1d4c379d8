"""`rollout` and `vllm`: the sampling of responses, and the engines that sample them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_suite.config.declarations.conditions import ON_GPUS, Need, is_false, is_null, is_one_of, is_positive, is_true
from rlhf_suite.config.declarations.flags import FIXED, FREE, SHAPE, flag
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import LOOPS, RL

SAMPLED = is_null(".replay")  # in a task that has this flag
# Training divides by the temperature.
OF_POLICY: Any = {
    "ge": 0.01,
    "help": "Sampling temperature. The training log-probs are divided by the same temperature",
}
# Methods of vLLM that need nothing but the weights; others read checkpoints that are quantised already.
QUANTIZATIONS = ("fp8", "fp8_per_channel", "fp8_per_block", "mxfp8", "int8_per_channel_weight_only")


@dataclass
class RolloutConfig(Section):
    """Sampling of responses. In task=ppo these are the responses that the policy is trained on"""

    n_samples_per_prompt: int = flag(
        1,
        "Number of samples per prompt (group size)",
        ge=1,
        needs=Need(is_positive(".temperature", "1"), "at temperature 0 all samples of a prompt are the same"),
        defaults=dict.fromkeys(LOOPS, 8),
    )
    max_new_tokens: int | None = flag(None, ge=1)
    """Longest response in tokens; null: the rest of data.max_len after the prompt"""
    temperature: float = flag(
        1.0, "Sampling temperature; 0: always the most likely token", ge=0, le=2, of_tasks=dict.fromkeys(RL, OF_POLICY)
    )
    top_p: float = flag(1.0, gt=0, le=1, when=SAMPLED)
    """Sample only from the most likely tokens that together have this probability (nucleus sampling); 1: from all"""
    top_k: int = flag(-1, "Sample only from the k most likely tokens; -1: from all", ge=-1, when=SAMPLED)
    min_p: float = flag(0.0, ge=0, lt=1, when=SAMPLED)
    """Ignore tokens whose probability is below this share of that of the most likely token; 0: ignore none"""
    repetition_penalty: float = flag(1.0, gt=0, when=SAMPLED)
    """Penalty on tokens that are already in the prompt or in the response. Their logits are divided by this number if
    they are positive, and multiplied by it if they are negative (Keskar et al. 2019). 1: no penalty"""
    stop: list[str] | None = flag(None, "Strings that end a response. The response includes the string", when=SAMPLED)
    seed: int = flag(42, tasks=("generate", *LOOPS))
    """Random seed. The random numbers of a sample depend only on this seed, on the row of the prompt, and on the number
    of the sample"""
    replay: str | None = flag(None, resume=FIXED, tasks=RL)
    """Folder of an earlier run of task=ppo. The run trains on the rollouts of that run, with their rewards. It starts
    no engine, samples nothing and scores nothing"""
    batch_size: int = flag(1024, "Number of prompts per RL step", ge=1, tasks=RL)
    vllm_generate_batch_size: int | None = flag(None, ge=1, when=SAMPLED, tasks=RL)
    """Number of prompts per sampling round; null: rollout.batch_size. If a round gives more groups than a step needs,
    the remaining groups wait for later steps. With train.partial_rollout_enable and no filter there are no rounds; the
    engines then work on as many additional groups as this number exceeds rollout.batch_size"""
    token_entropy: bool = flag(False, tasks=RL)
    """Compute the entropy of the policy at each token before the update, for the rollout files and the report.
    Estimators that need entropies compute them in any case"""
    micro_batch_size: int | None = flag(None, ge=1, resume=SHAPE, tasks=RL)
    """Number of sequences per forward pass over a rollout; null: as many as fit into the token budget"""
    max_tokens_per_gpu: int | None = flag(
        None, ge=1, resume=SHAPE, when=is_null(".micro_batch_size") | is_true("train.dynamic_batch_enable"), tasks=RL
    )
    """Token budget of a forward pass over a rollout; null: train.max_tokens_per_gpu"""


@dataclass
class VLLMConfig(Section):
    """vLLM engines, each in one Ray actor. In task=ppo they get the new weights of the policy after its updates"""

    num_engines: int = flag(1, "Number of engines", ge=1, resume=FREE)
    tensor_parallel_size: int = flag(1, ge=1, resume=SHAPE)
    """Tensor parallelism: number of devices that split every layer of an engine"""
    pipeline_parallel_size: int = flag(1, ge=1, resume=SHAPE)
    """Pipeline parallelism: number of stages that split the layers of an engine. Each stage has
    vllm.tensor_parallel_size devices"""
    gpu_memory_utilization: float | None = flag(None, gt=0, le=1, resume=FREE)
    """Share of the GPU memory that an engine may use; null: 0.9, or 0.4 with train.colocate_all"""
    kv_cache_mb: int | None = flag(None, ge=1, resume=FREE)
    """Size of the KV cache in MiB; null: on GPUs it follows from gpu_memory_utilization, on CPUs it is 64"""
    max_restarts: int = flag(3, ge=0, resume=FREE)
    """Number of times that an engine is restarted after its process has died. Its unfinished requests are repeated. 0:
    the run ends instead. Above 0, the weights of the last sync are kept in host memory if the trainer may have newer
    ones"""
    max_num_seqs: int | None = flag(None, ge=1)
    """Largest number of sequences that an engine runs at the same time; null: on GPUs vLLM's own number (1,024 on large
    ones), on CPUs 256"""
    enforce_eager: bool = flag(False, "Disable CUDA graphs (on CPUs there are none)")
    enable_prefix_caching: bool | None = flag(None)
    """Reuse the KV cache for sequences with a common prefix. Every weight sync empties this cache. The metric
    perf/prefix_cache_hits is the share of all prompt tokens that were found in it. null: true on GPUs, false on CPUs"""
    quantization: str | None = flag(
        None,
        choices=QUANTIZATIONS,
        needs=Need(is_one_of("ds.param_dtype", "bf16"), "only bf16 weights can be quantised"),
    )
    """How the engines quantise the weights of linear layers when they load them (int8: only those of experts); null: no
    quantisation. RL with quantised engines needs a correction and a value of algo.mismatch_max (docs/rl_engines.md)"""
    speculative_config: dict[str, Any] = flag({})
    """Speculative decoding, with the settings of vLLM: {method: ngram, num_speculative_tokens: 3}, or method
    draft_model with the draft model. The distribution of samples does not change. The metric engine/acceptance is the
    share of draft tokens that are accepted. {}: off"""
    engine_args: dict[str, Any] = flag({})
    """Further arguments of vLLM's EngineArgs by name, such as {enable_expert_parallel: true}. Arguments that the suite
    sets itself are refused"""
    enable_sleep: bool = flag(
        False,
        resume=SHAPE,
        needs=Need(
            is_true("train.colocate_all"),
            "an engine with a GPU of its own gains nothing from sleep",
            fix="write vllm.enable_sleep=false, or train.colocate_all=true",
        ),
        tasks=RL,
    )
    """Free the GPU memory of the engines while the models train"""
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
    """How weights are sent to the engines: shm (shared memory of one node), gloo, nccl, or ipc (between processes on
    the same GPU). auto: on GPUs ipc or nccl, on CPUs shm or gloo"""
    sync_check: str = flag("full", choices=("off", "digest", "full"), tasks=RL)
    """How each weight sync is verified. digest: compare a digest of every tensor; full: also compare the log-probs of a
    probe. With images (data.image_key) there is no probe, and only the log-probs of rollouts are compared. off: no
    check"""
    sync_adapters: bool = flag(True, resume=SHAPE, when=is_positive("ds.lora.rank", "<rank>"), tasks=RL)
    """With LoRA: the engines hold the base model, and a weight sync sends only the adapters, if vLLM can apply them.
    false: a sync sends all weights with the adapters merged into them, and the engines generate faster"""

    @property
    def devices(self) -> int:
        """The devices of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


CPU_SEQUENCES, GPU_SEQUENCES = 256, 1024  # that vllm.max_num_seqs=null stands for; vLLM takes fewer on small GPUs


def most_sequences(config: VLLMConfig, device: str) -> int:
    """Return the most sequences that an engine runs at once."""
    return config.max_num_seqs or (GPU_SEQUENCES if device == "cuda" else CPU_SEQUENCES)
