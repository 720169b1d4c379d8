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
FUSED_ON_GPUS = Need(ON_GPUS, "Liger's kernels run only on GPUs", off="false")
PADDED = is_one_of(".packing_samples", None, False, remedy="false")
WHOLE_WEIGHTS, WHOLE_ROWS = is_one_of(".tensor_parallel_size", 1), is_one_of(".ring_attn_size", 1)


@dataclass
class LoRAConfig:
    """Low-rank adapters (LoRA)"""

    rank: int = flag(0, "Rank of the adapters; 0: no adapters, all weights are trained", ge=0, resume=FIXED)
    alpha: int = flag(16, "Scaling of the adapters: their output is multiplied by alpha / rank", ge=1, when=ADAPTED)
    dropout: float = flag(0.0, "Dropout on the input of the adapters", ge=0, lt=1, when=ADAPTED)
    target_modules: list[str] = flag([ALL_LINEAR], resume=FIXED, when=ADAPTED)
    """Names of the modules that get adapters; all-linear: all linear layers"""


@dataclass
class DeepSpeedConfig(Section):
    """DeepSpeed, precision, attention, LoRA"""

    param_dtype: str | None = flag(
        "bf16",
        choices=("bf16", "fp32"),
        resume=FIXED,
        tasks=(*TRAINING, "generate", *OWN_PRECISION),
        defaults=dict.fromkeys(OWN_PRECISION, None),
        never_null=(*TRAINING, "generate"),
        of_tasks={"score": {"when": (BY_REWARD_MODEL | is_true("reward.process.enable"),)}},
    )
    """Precision of parameters and activations. The optimiser state is always fp32. null: the precision of the
    checkpoint, or fp32 if that is neither bf16 nor fp32"""
    attn_implementation: str | None = flag(
        None,
        needs=(
            HALF_PRECISION,
            Need(ON_GPUS, "flash kernels run only on GPUs", FLASH, "varlen"),
            Need(WHOLE_ROWS, "flash kernels do not see the tokens of other ranks", FLASH, "varlen"),
            Need(WHOLE_ROWS, BORDERS, PLAIN_ATTENTION, "varlen"),
            Need(is_false("data.pack_to_max_len"), BORDERS, PLAIN_ATTENTION, "varlen"),
            Need(PADDED, BORDERS, PLAIN_ATTENTION, "varlen"),
        ),
        tasks=(*TRAINING, "serve_rm"),
    )
    """Attention implementation. null: the best one for the model family (docs/support.md). varlen: the suite's own,
    exact with and without packing, on CPUs and GPUs. sdpa, eager, flash_attention_2 and flash_attention_3 are those of
    transformers. kernels-community/<name> is a kernel from the Hugging Face hub, which is downloaded"""
    experts_implementation: str | None = flag(
        None,
        choices=("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe"),
        tasks=(*TRAINING, "serve_rm"),
    )
    """Implementation of the experts in a mixture of experts, by its name in transformers; null: grouped_mm if the model
    supports it"""
    packing_samples: bool | None = flag(None, tasks=(*TRAINING, "serve_rm"))
    """Put the sequences of a micro-batch end to end in one row, without padding. The gradients are the same. null: pack
    if the model family and its attention support it (docs/support.md) and ds.deepcompile is off; otherwise pad. The log
    of the run says which"""
    share_prefixes: bool | None = flag(
        None,
        needs=(
            Need(is_one_of(".packing_samples", None, True, remedy="null"), "prefixes are shared only in packed rows"),
            Need(
                is_one_of(".attn_implementation", None, "varlen", remedy="varlen"),
                "other kernels cannot read the keys of another sequence",
            ),
            Need(is_one_of(".ring_attn_size", 1), "prefixes are not shared if ranks split the tokens of sequences"),
            Need(is_one_of(".lora.dropout", 0.0), "all sequences of a prefix would have the same dropout"),
        ),
        tasks=(*TRAINING, "serve_rm"),
    )
    """Compute a common beginning of sequences in a micro-batch only once: the prompt of a pair of answers or of a group
    of samples, or the turns before branches of an episode. The gradients are the same. null: true on CPUs, if the model
    family supports it and there is no dropout (docs/models.md; not run on a GPU yet)"""
    value_head_prefix: str = flag(
        "score", tasks=(*TRAINING, "score", "serve_rm"), of_tasks={"score": {"when": (BY_REWARD_MODEL,)}}
    )
    """Name of the head with one output, in critics and reward models"""
    load_in_4bit: bool = flag(
        False,
        resume=FIXED,
        needs=(
            Need(is_positive(".lora.rank", "<rank>"), "4-bit weights cannot be trained themselves"),
            Need(is_one_of(".zero_stage", None, 0, 1, 2, remedy="2"), "ZeRO-3 cannot partition 4-bit weights"),
        ),
        tasks=(*TRAINING, "serve_rm", "chat"),
    )
    """Store the weight matrices of the layers in 4 bits (nf4, double quantisation). They take a quarter of the memory
    of bf16. In tasks that train, these weights are frozen and LoRA adapters are trained (QLoRA)"""
    zero_stage: int | None = flag(
        None,
        choices=(0, 1, 2, 3),
        resume=SHAPE,
        needs=Need(
            is_one_of(".param_dtype", "fp32"),
            "ZeRO-0 keeps no fp32 master weights, and small updates of bf16 weights are lost by rounding",
            at=is_one_of("", 0),
        ),
        tasks=TRAINING,
    )
    """ZeRO stage of DeepSpeed. null: 2 if a model has several ranks, or if another flag needs DeepSpeed
    (ds.adam_offload, ds.overlap_comm, ds.deepcompile, ds.enable_sleep, optim=muon). Otherwise one rank trains without
    DeepSpeed, with the AdamW of torch and fp32 master weights"""
    use_universal_ckpt: bool = flag(False, resume=FREE, when=is_true("ckpt.load_enable"), tasks=TRAINING)
    """Allow to resume with other settings than those of the checkpoint: number of ranks, ZeRO stage, sequence
    parallelism, placement, devices of engines, and micro-batches"""
    adam_offload: bool = flag(
        False,
        "Keep the optimiser state in host memory",
        resume=SHAPE,
        needs=Need(NOT_ZERO_0, "only ZeRO-1 to 3 can offload the optimiser state"),
        tasks=TRAINING,
    )
    cpu_adam: str = flag(
        "torch", choices=("torch", "deepspeed"), resume=SHAPE, when=is_true(".adam_offload"), tasks=TRAINING
    )
    """Implementation of AdamW for updates in host memory: torch, or deepspeed (DeepSpeedCPUAdam). The first use of
    deepspeed compiles it for some minutes, and needs a C++ compiler and ninja"""
    overlap_comm: bool | None = flag(
        None,
        resume=SHAPE,
        needs=(Need(NOT_ZERO_0, "ZeRO-0 reduces gradients after the backward pass", off="false"),),
        tasks=TRAINING,
    )
    """Reduce gradients during the backward pass; null: true on GPUs with ZeRO-2 and 3, but not with Muon or
    ds.deepcompile"""
    persistence_threshold: int | None = flag(None, ge=0, resume=SHAPE, when=PARTITIONED, tasks=TRAINING)
    """ZeRO-3 does not partition parameters with at most this number of elements, such as those of norms. Each rank
    keeps them whole; null: 100000 on GPUs without ds.deepcompile, else 0"""
    deepcompile: bool = flag(
        False,
        resume=SHAPE,
        needs=(
            Need(ON_GPUS, "DeepSpeed compiles only for GPUs"),
            Need(NOT_ZERO_0, "DeepSpeed compiles only ZeRO-1 to 3"),
            Need(PADDED, "packed rows have many different shapes, and each would be compiled"),
            Need(WHOLE_ROWS, "ranks can split the tokens only of packed rows"),
            Need(is_one_of(".overlap_comm", None, False, remedy="false"), "the compiled graph reduces the gradients"),
            Need(is_false(".adam_offload"), "the gradients of compiled graphs stay on the GPU"),
            Need(is_false(".enable_sleep"), "the gradients of compiled graphs stay on the GPU"),
            Need(is_one_of(".lora.rank", 0), "it has not been tested with LoRA"),
            Need(WHOLE_WEIGHTS, "DeepSpeed does not compile tensor parallelism"),
            Need(is_one_of(".zpg", 1), "the compiled graph gathers from all ranks"),
        ),
        tasks=TRAINING,
    )
    """Compile the model together with the gathering of its weights and the reduction of its gradients (DeepCompile of
    DeepSpeed; not run on a GPU yet). Use it if micro-batches have few different shapes"""
    zpg: int = flag(
        1,
        "Number of ranks in a secondary partition of the weights (ZeRO++); 1: no secondary partition",
        ge=1,
        resume=SHAPE,
        needs=(
            Need(PARTITIONED, "only ZeRO-3 partitions the weights"),
            Need(WHOLE_WEIGHTS, "it has not been tested with tensor parallelism"),
        ),
        tasks=TRAINING,
    )
    zero3_leaf_modules: list[str] = flag([], when=PARTITIONED, tasks=TRAINING)
    """Classes of modules that ZeRO-3 gathers as a whole. Mixtures of experts need them if the experts are separate
    modules, because ranks may use different experts at the same time. DeepSpeed already knows the classes of Mixtral,
    Qwen2-MoE and Qwen3-MoE"""
    grad_accum_dtype: str = flag(
        "fp32",
        choices=("fp32", "bf16"),
        needs=Need(is_one_of(".param_dtype", "bf16"), "the gradients of fp32 parameters would be rounded"),
        tasks=TRAINING,
    )
    """Data type in which the gradients of the micro-batches of a step are summed. bf16 halves their memory, but the
    rounding error grows with the number of micro-batches"""
    ring_attn_size: int = flag(
        1,
        ge=1,
        resume=SHAPE,
        needs=Need(
            is_one_of(".packing_samples", None, True, remedy="null"),
            "ranks can split the tokens only of packed rows",
        ),
        tasks=TRAINING,
    )
    """Sequence parallelism: number of ranks of a model that split the tokens of each batch. Use it for sequences that
    are too long for one rank"""
    ring_attn_mode: str = flag(
        "gather",
        choices=("gather", "ring", "ulysses"),
        resume=SHAPE,
        when=SPLIT,
        needs=Need(WHOLE_WEIGHTS, "both would split the attention heads", at=is_one_of("", "ulysses")),
        tasks=TRAINING,
    )
    """How attention gets the tokens of other ranks. gather: collect all keys and values; ring: pass keys and values
    from rank to rank; ulysses: exchange tokens for attention heads"""
    tensor_parallel_size: int = flag(
        1,
        ge=1,
        resume=FIXED,
        needs=Need(is_one_of(".lora.rank", 0), "LoRA adapters need whole matrices"),
        tasks=TRAINING,
    )
    """Tensor parallelism: number of ranks of a model that split the matrices of its layers (AutoTP of DeepSpeed). It
    works for dense language models and reward models, with ds.zero_stage=0 to 2"""
    use_liger_kernel: bool | None = flag(
        None,
        needs=(
            FUSED_ON_GPUS,
            Need(WHOLE_WEIGHTS, "Liger's kernels have not been tested with tensor parallelism", off="false"),
        ),
        tasks=TRAINING,
    )
    """Use the fused layer kernels of Liger in trained models. null: true on GPUs if Liger is installed and supports the
    model, the model reads only text, and ds.tensor_parallel_size and ds.deepcompile are not used"""
    lora: LoRAConfig = group(LoRAConfig, tasks=TRAINING)
    enable_sleep: bool = flag(
        False,
        resume=SHAPE,
        needs=(
            Need(
                is_true("train.colocate_all"),
                "a model with a GPU of its own gains nothing from sleep",
                fix="write ds.enable_sleep=false, or train.colocate_all=true",
            ),
            Need(
                is_one_of(".zero_stage", None, 2, 3, remedy="2"),
                "DeepSpeed can move only the optimiser states of ZeRO-2 and 3",
            ),
            Need(is_false(".adam_offload"), "with it the optimiser state is always in host memory"),
        ),
        tasks=RL,
    )
    """Keep the optimiser state and the fp32 weights in host memory, except while the model is updated"""

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
