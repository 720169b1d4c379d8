"""`ds`: DeepSpeed, precision, attention, LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_suite.config.declarations.flags import FIXED, FREE, SHAPE, When, flag, group, is_positive, is_true
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import OWN_PRECISION, RL, TRAINING

ATTENTION = ("varlen", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
HUB_KERNELS = "kernels-community/"
ALL_LINEAR = "all-linear"  # a value of ds.lora.target_modules
ADAPTED = is_positive(".rank", "<rank>")
PARTITIONED = When(".zero_stage", lambda stage: stage == 3, "=3", "3")
SPLIT = When(".ring_attn_size", lambda size: size > 1, " > 1", "<number > 1>")


@dataclass
class LoRAConfig:
    """Low-rank adapters"""

    rank: int = flag(0, "Rank of the adapters; 0: full fine-tuning", ge=0, resume=FIXED)
    alpha: int = flag(16, "Updates are scaled by alpha / rank", ge=1, when=ADAPTED)
    dropout: float = flag(0.0, "Dropout on the adapter's input", ge=0, lt=1, when=ADAPTED)
    target_modules: list[str] = flag([ALL_LINEAR], resume=FIXED, when=ADAPTED)
    """Names of the modules that get adapters, or all-linear"""


@dataclass
class DeepSpeedConfig(Section):
    """DeepSpeed, precision, attention"""

    param_dtype: str | None = flag(
        "bf16",
        choices=("bf16", "fp32"),
        resume=FIXED,
        tasks=(*TRAINING, "generate", *OWN_PRECISION),
        defaults=dict.fromkeys(OWN_PRECISION, None),
        never_null=(*TRAINING, "generate"),
    )
    """Precision of parameters and activations; optimiser state is always fp32. null: that of the checkpoint, or fp32 if
    it is neither bf16 nor fp32"""
    attn_implementation: str | None = flag(None, tasks=(*TRAINING, "serve_rm"))
    """null: the best that the family of the model can do (docs/support.md); varlen: exact with and without packing, on
    CPU and GPU; or one of transformers: sdpa, eager, flash_attention_2, flash_attention_3, or a kernel of the hub,
    kernels-community/<name>, which is downloaded"""
    experts_implementation: str | None = flag(
        None,
        choices=("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe"),
        tasks=(*TRAINING, "serve_rm"),
    )
    """How a mixture of experts computes its experts, by the name in transformers; null: grouped_mm where the model
    supports it"""
    packing_samples: bool | None = flag(None, tasks=(*TRAINING, "serve_rm"))
    """Lay sequences end to end in one row, without padding, which gives the same gradients; null: where the family of
    the model and its attention can (docs/support.md), else, and with ds.deepcompile, rows are padded. The log of the
    run says which"""
    value_head_prefix: str = flag("score", tasks=(*TRAINING, "score", "serve_rm"))
    """Name of the scalar head of critic and reward model"""
    load_in_4bit: bool = flag(False, resume=FIXED, tasks=(*TRAINING, "serve_rm", "chat"))
    """Keep the matrices of the layers in 4 bits (nf4, double quantisation), a quarter of the memory of bf16; in tasks
    that train those that LoRA freezes (QLoRA)"""
    zero_stage: int | None = flag(2, choices=(0, 1, 2, 3), resume=SHAPE, tasks=TRAINING)
    """ZeRO stage of DeepSpeed; null: without DeepSpeed, by the AdamW of torch on one rank, with fp32 master weights"""
    use_universal_ckpt: bool = flag(False, resume=FREE, when=is_true("ckpt.load_enable"), tasks=TRAINING)
    """Resume also in another shape than that of the checkpoint: other ranks, ZeRO stages, sequence parallelism,
    placement, split of the engines, and micro-batches"""
    adam_offload: bool = flag(False, "Keep the optimiser state in host memory", resume=SHAPE, tasks=TRAINING)
    cpu_adam: str = flag(
        "torch", choices=("torch", "deepspeed"), resume=SHAPE, when=is_true(".adam_offload"), tasks=TRAINING
    )
    """Whose AdamW updates in host memory: torch, or deepspeed (DeepSpeedCPUAdam; its first use compiles it, for
    minutes, with a C++ compiler and ninja)"""
    overlap_comm: bool | None = flag(None, resume=SHAPE, tasks=TRAINING)
    """Overlap gradient reduction with the backward pass (ZeRO-1 to 3); null: on GPUs with ZeRO-2 and 3, but not with
    Muon"""
    persistence_threshold: int | None = flag(None, ge=0, resume=SHAPE, when=PARTITIONED, tasks=TRAINING)
    """Parameters of at most so many numbers, such as those of norms, stay whole on each rank between passes; null:
    100000 on GPUs without ds.deepcompile, else 0"""
    deepcompile: bool = flag(False, resume=SHAPE, tasks=TRAINING)
    """Compile the model with the gathering of its weights and the reduction of its gradients: DeepCompile, for ZeRO-1
    to 3 on GPUs (not run on one yet), and for micro-batches of few different shapes"""
    zpg: int = flag(1, "Size of the secondary partition of ZeRO++ (stage 3)", ge=1, resume=SHAPE, tasks=TRAINING)
    zero3_leaf_modules: list[str] = flag([], when=PARTITIONED, tasks=TRAINING)
    """Classes of modules that ZeRO-3 gathers as a whole: for mixtures whose experts are separate modules, of which a
    rank may use others than its neighbour. DeepSpeed adds those of Mixtral, Qwen2-MoE and Qwen3-MoE by itself"""
    grad_accum_dtype: str = flag("fp32", choices=("fp32", "bf16"), tasks=TRAINING)
    """Type in which the gradients of a step's micro-batches are added up; bf16 halves their memory, but the error of
    the sum grows with the number of micro-batches"""
    ring_attn_size: int = flag(1, ge=1, resume=SHAPE, tasks=TRAINING)
    """Sequence parallelism: so many ranks of each model split the tokens of a batch, for sequences that are too long
    for one"""
    ring_attn_mode: str = flag(
        "gather", choices=("gather", "ring", "ulysses"), resume=SHAPE, when=SPLIT, tasks=TRAINING
    )
    """How attention reaches the tokens of other ranks: gather collects all keys and values, ring passes them from rank
    to rank, ulysses exchanges tokens for heads"""
    tensor_parallel_size: int = flag(1, ge=1, resume=FIXED, tasks=TRAINING)
    """Tensor parallelism: so many ranks of each model split the matrices of its layers (AutoTP of DeepSpeed; dense
    language and reward models, ds.zero_stage=0 to 2)"""
    use_liger_kernel: bool | None = flag(None, tasks=TRAINING)
    """Use Liger's fused layer kernels in trained models; null: on GPUs where it is installed and knows a model of text
    alone, without ds.tensor_parallel_size and ds.deepcompile"""
    lora: LoRAConfig = group(LoRAConfig, tasks=TRAINING)
    enable_sleep: bool = flag(
        False,
        resume=SHAPE,
        when=is_true("train.colocate_all"),
        strict="a model that shares no GPU has no reason to leave it",
        tasks=RL,
    )
    """Keep optimiser state and fp32 weights in host memory but while a model is updated; needs ds.zero_stage=2
    or 3"""

    @property
    def precision(self) -> str:
        """The precision of the models, in a task in which it is not that of each checkpoint."""
        assert self.param_dtype is not None, f"task={self.TASK} declares that ds.param_dtype may be null"
        return self.param_dtype

    @property
    def splits_tokens(self) -> bool:
        """Whether several ranks of a model split the tokens of a batch."""
        return self.has("ring_attn_size") and self.ring_attn_size > 1


def load_settings(**flags: Any) -> DeepSpeedConfig:
    """Return settings with which a model is loaded apart from those of a run; other flags have the defaults of
    training."""
    return DeepSpeedConfig.of("sft", **flags)


def wanted_packing(ds: DeepSpeedConfig) -> bool | None:
    """Return whether a run wants packed rows; None: where its models can."""
    if ds.packing_samples is None and ds.has("deepcompile") and ds.deepcompile:
        return False
    return ds.packing_samples


def is_flash(attn_implementation: str | None) -> bool:
    """Return whether an attention is a flash kernel: of a package or of the hub, for GPUs and half precision alone."""
    return attn_implementation is not None and attn_implementation.startswith(("flash_attention_", HUB_KERNELS))


FAST_DEVICES = ("cuda",)  # where gradients are scattered, and beside the backward pass, unless a flag says otherwise


def overlaps_reduction(ds: DeepSpeedConfig, device: str) -> bool:
    """Return whether gradients are reduced while the backward pass still runs."""
    if ds.overlap_comm is not None:
        return ds.overlap_comm
    return device in FAST_DEVICES and ds.zero_stage in (2, 3) and not ds.deepcompile


def scatters_gradients(ds: DeepSpeedConfig, device: str) -> bool:
    """Return whether a rank of ZeRO-3 gets its part of the gradients alone. On a CPU all ranks get all of them, whose
    sums have another order: numbers of earlier runs stay what they are. DeepCompile, which runs on GPUs alone, always
    scatters them, by operations of its own."""
    return device in FAST_DEVICES and ds.zero_stage == 3
