"""`ds`: DeepSpeed, precision, attention, LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_suite.config.declarations.conditions import (
    BY_REWARD_MODEL,
    ON_GPUS,
    Condition,
    Need,
    is_above,
    is_false,
    is_one_of,
    is_positive,
    is_true,
)
from rlhf_suite.config.declarations.flags import FIXED, FREE, SHAPE, flag, group
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import OWN_PRECISION, RL, TRAINING

ATTENTION = ("varlen", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
HUB_KERNELS = "kernels-community/"
ALL_LINEAR = "all-linear"  # a value of ds.lora.target_modules
ADAPTED = is_positive(".rank", "<rank>")


def is_flash(attn_implementation: str | None) -> bool:
    """Return whether an attention is a flash kernel: of a package or of the hub, for GPUs and half precision alone."""
    return attn_implementation is not None and attn_implementation.startswith(("flash_attention_", HUB_KERNELS))


FLASH = Condition("", is_flash, " is a flash kernel", "", "=<a flash kernel>")
PLAIN_ATTENTION, BORDERS = is_one_of("", "sdpa", "eager"), "packed sequences would see each other"
PARTITIONED = is_one_of(".zero_stage", 3)
NOT_ZERO_0 = is_one_of(".zero_stage", None, 1, 2, 3, remedy="2")
SPLIT = is_above(".ring_attn_size", 1, "<number > 1>")
HALF_PRECISION = Need(
    is_one_of(".param_dtype", None, "bf16", remedy="bf16"), "flash attention has no fp32 kernels", FLASH, "varlen"
)
FUSED_ON_GPUS = Need(ON_GPUS, "Liger's kernels are for GPUs alone", off="false")
PADDED = is_one_of(".packing_samples", None, False, remedy="false")
WHOLE_WEIGHTS, WHOLE_ROWS = is_one_of(".tensor_parallel_size", 1), is_one_of(".ring_attn_size", 1)


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
        of_tasks={"score": {"when": (BY_REWARD_MODEL | is_true("reward.process.enable"),)}},
    )
    """Precision of parameters and activations; optimiser state is always fp32. null: that of the checkpoint, or fp32 if
    it is neither bf16 nor fp32"""
    attn_implementation: str | None = flag(
        None,
        needs=(
            HALF_PRECISION,
            Need(ON_GPUS, "flash kernels are for GPUs alone", FLASH, "varlen"),
            Need(WHOLE_ROWS, "flash kernels do not reach the tokens of other ranks", FLASH, "varlen"),
            Need(WHOLE_ROWS, BORDERS, PLAIN_ATTENTION, "varlen"),
            Need(is_false("data.pack_to_max_len"), BORDERS, PLAIN_ATTENTION, "varlen"),
            Need(PADDED, BORDERS, PLAIN_ATTENTION, "varlen"),
        ),
        tasks=(*TRAINING, "serve_rm"),
    )
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
    share_prefixes: bool | None = flag(
        None,
        needs=(
            Need(is_one_of(".packing_samples", None, True, remedy="null"), "padded rows are computed whole"),
            Need(
                is_one_of(".attn_implementation", None, "varlen", remedy="varlen"),
                "other kernels do not read the keys of another sequence",
            ),
            Need(is_one_of(".ring_attn_size", 1), "ranks split the tokens of whole sequences"),
            Need(is_one_of(".lora.dropout", 0.0), "the sequences of a prefix would have the same dropout"),
        ),
        tasks=(*TRAINING, "serve_rm"),
    )
    """Compute once what sequences of a micro-batch begin with in common: the prompt of a pair of answers, of a group of
    samples, the turns before branches of an episode. It gives the same gradients; null: on CPUs, where the family of
    the model can and there is no dropout (docs/models.md; not run on a GPU yet)"""
    value_head_prefix: str = flag(
        "score", tasks=(*TRAINING, "score", "serve_rm"), of_tasks={"score": {"when": (BY_REWARD_MODEL,)}}
    )
    """Name of the scalar head of critic and reward model"""
    load_in_4bit: bool = flag(
        False,
        resume=FIXED,
        needs=(
            Need(is_positive(".lora.rank", "<rank>"), "4-bit weights cannot be trained themselves"),
            Need(is_one_of(".zero_stage", None, 0, 1, 2, remedy="2"), "ZeRO-3 cannot partition 4-bit weights"),
        ),
        tasks=(*TRAINING, "serve_rm", "chat"),
    )
    """Keep the matrices of the layers in 4 bits (nf4, double quantisation), a quarter of the memory of bf16; in tasks
    that train those that LoRA freezes (QLoRA)"""
    zero_stage: int | None = flag(
        None,
        choices=(0, 1, 2, 3),
        resume=SHAPE,
        needs=Need(
            is_one_of(".param_dtype", "fp32"),
            "ZeRO-0 keeps no fp32 master weights, and a bf16 weight does not move by a small update",
            at=is_one_of("", 0),
        ),
        tasks=TRAINING,
    )
    """ZeRO stage of DeepSpeed; null: 2 if a model has several ranks, or if another flag asks for DeepSpeed
    (ds.adam_offload, ds.overlap_comm, ds.deepcompile, ds.enable_sleep, optim=muon); else none, and the AdamW of torch
    trains on one rank without buffers for other ranks, with fp32 master weights"""
    use_universal_ckpt: bool = flag(False, resume=FREE, when=is_true("ckpt.load_enable"), tasks=TRAINING)
    """Resume also in another shape than that of the checkpoint: other ranks, ZeRO stages, sequence parallelism,
    placement, split of the engines, and micro-batches"""
    adam_offload: bool = flag(
        False,
        "Keep the optimiser state in host memory",
        resume=SHAPE,
        needs=Need(NOT_ZERO_0, "ZeRO-1 to 3 alone keep the state of their optimiser elsewhere"),
        tasks=TRAINING,
    )
    cpu_adam: str = flag(
        "torch", choices=("torch", "deepspeed"), resume=SHAPE, when=is_true(".adam_offload"), tasks=TRAINING
    )
    """Whose AdamW updates in host memory: torch, or deepspeed (DeepSpeedCPUAdam; its first use compiles it, for
    minutes, with a C++ compiler and ninja)"""
    overlap_comm: bool | None = flag(
        None,
        resume=SHAPE,
        needs=(Need(NOT_ZERO_0, "ZeRO-0 reduces gradients after the backward pass", off="false"),),
        tasks=TRAINING,
    )
    """Overlap gradient reduction with the backward pass; null: on GPUs with ZeRO-2 and 3, but not with Muon"""
    persistence_threshold: int | None = flag(None, ge=0, resume=SHAPE, when=PARTITIONED, tasks=TRAINING)
    """Parameters of at most so many numbers, such as those of norms, stay whole on each rank between passes; null:
    100000 on GPUs without ds.deepcompile, else 0"""
    deepcompile: bool = flag(
        False,
        resume=SHAPE,
        needs=(
            Need(ON_GPUS, "DeepSpeed compiles for GPUs alone"),
            Need(NOT_ZERO_0, "DeepSpeed compiles ZeRO-1 to 3"),
            Need(PADDED, "packed rows have ever new shapes, each compiled anew"),
            Need(WHOLE_ROWS, "ranks split the tokens of packed rows alone"),
            Need(is_one_of(".overlap_comm", None, False, remedy="false"), "the compiled graph reduces the gradients"),
            Need(is_false(".adam_offload"), "the gradients of compiled graphs stay on the GPU"),
            Need(is_false(".enable_sleep"), "the gradients of compiled graphs stay on the GPU"),
            Need(is_one_of(".lora.rank", 0), "frozen weights beside adapters have not been tried"),
            Need(WHOLE_WEIGHTS, "DeepSpeed does not compile split matrices"),
            Need(is_one_of(".zpg", 1), "the compiled graph gathers from all ranks"),
        ),
        tasks=TRAINING,
    )
    """Compile the model with the gathering of its weights and the reduction of its gradients: DeepCompile (not run on a
    GPU yet), for micro-batches of few different shapes"""
    zpg: int = flag(
        1,
        "Size of the secondary partition of ZeRO++",
        ge=1,
        resume=SHAPE,
        needs=(
            Need(PARTITIONED, "ZeRO-3 alone partitions the weights"),
            Need(WHOLE_WEIGHTS, "a second partition of the weights has not been tried with split matrices"),
        ),
        tasks=TRAINING,
    )
    zero3_leaf_modules: list[str] = flag([], when=PARTITIONED, tasks=TRAINING)
    """Classes of modules that ZeRO-3 gathers as a whole: for mixtures whose experts are separate modules, of which a
    rank may use others than its neighbour. DeepSpeed adds those of Mixtral, Qwen2-MoE and Qwen3-MoE by itself"""
    grad_accum_dtype: str = flag(
        "fp32",
        choices=("fp32", "bf16"),
        needs=Need(is_one_of(".param_dtype", "bf16"), "gradients of fp32 parameters would be rounded"),
        tasks=TRAINING,
    )
    """Type in which the gradients of a step's micro-batches are added up; bf16 halves their memory, but the error of
    the sum grows with the number of micro-batches"""
    ring_attn_size: int = flag(
        1,
        ge=1,
        resume=SHAPE,
        needs=Need(
            is_one_of(".packing_samples", None, True, remedy="null"),
            "ranks split the tokens of one row without padding",
        ),
        tasks=TRAINING,
    )
    """Sequence parallelism: so many ranks of each model split the tokens of a batch, for sequences that are too long
    for one"""
    ring_attn_mode: str = flag(
        "gather",
        choices=("gather", "ring", "ulysses"),
        resume=SHAPE,
        when=SPLIT,
        needs=Need(WHOLE_WEIGHTS, "both would split the heads", at=is_one_of("", "ulysses")),
        tasks=TRAINING,
    )
    """How attention reaches the tokens of other ranks: gather collects all keys and values, ring passes them from rank
    to rank, ulysses exchanges tokens for heads"""
    tensor_parallel_size: int = flag(
        1,
        ge=1,
        resume=FIXED,
        needs=Need(is_one_of(".lora.rank", 0), "LoRA adds its adapters to whole matrices"),
        tasks=TRAINING,
    )
    """Tensor parallelism: so many ranks of each model split the matrices of its layers (AutoTP of DeepSpeed; dense
    language and reward models, ds.zero_stage=0 to 2)"""
    use_liger_kernel: bool | None = flag(
        None,
        needs=(
            FUSED_ON_GPUS,
            Need(WHOLE_WEIGHTS, "Liger's kernels have not been tried with split matrices", off="false"),
        ),
        tasks=TRAINING,
    )
    """Use Liger's fused layer kernels in trained models; null: on GPUs where it is installed and knows a model of text
    alone, without ds.tensor_parallel_size and ds.deepcompile"""
    lora: LoRAConfig = group(LoRAConfig, tasks=TRAINING)
    enable_sleep: bool = flag(
        False,
        resume=SHAPE,
        needs=(
            Need(
                is_true("train.colocate_all"),
                "a model that shares no GPU has no reason to leave it",
                fix="write ds.enable_sleep=false, or train.colocate_all=true",
            ),
            Need(
                is_one_of(".zero_stage", None, 2, 3, remedy="2"),
                "DeepSpeed moves optimiser states of ZeRO-2 and 3 alone",
            ),
            Need(is_false(".adam_offload"), "the optimiser state is always in host memory then"),
        ),
        tasks=RL,
    )
    """Keep optimiser state and fp32 weights in host memory but while a model is updated"""

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
