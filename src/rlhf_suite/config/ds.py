"""`ds`: DeepSpeed, precision, attention, LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rlhf_suite.config.flags import FIXED, flag, group, is_positive
from rlhf_suite.config.problems import Problem, rule

if TYPE_CHECKING:
    from rlhf_suite.config.runs import AnyTrainedRun, PPORun, ServeRMRun


ADAPTED = is_positive(".rank", "<rank>")


@dataclass
class LoRAConfig:
    """Low-rank adapters"""

    rank: int = flag(0, "Rank of the adapters; 0: full fine-tuning", ge=0, resume=FIXED)
    alpha: int = flag(16, "Updates are scaled by alpha / rank", ge=1, when=ADAPTED)
    dropout: float = flag(0.0, "Dropout on the adapter's input", ge=0, lt=1, when=ADAPTED)
    target_modules: list[str] = flag(
        ["all-linear"], "Names of the modules that get adapters, or all-linear", resume=FIXED, when=ADAPTED
    )


@dataclass
class PrecisionConfig:
    """Precision"""

    param_dtype: str = flag(
        "bf16",
        "Precision of parameters and activations; optimiser state is always fp32",
        choices=("bf16", "fp32"),
        resume=FIXED,
    )


@dataclass
class OwnPrecisionConfig:
    """Precision"""

    param_dtype: str | None = flag(
        None,
        "Precision of the model; null: that of its checkpoint (fp32 if the checkpoint is neither bf16 nor fp32)",
        choices=("bf16", "fp32"),
    )


@dataclass
class RewardModelConfig(OwnPrecisionConfig):
    """Precision and head of a reward model"""

    value_head_prefix: str = flag("score", "Name of its scalar head")


@dataclass
class AttentionConfig:
    """Attention and head"""

    attn_implementation: str = flag(
        "varlen",
        "varlen: exact with and without packing, on CPU and GPU; the others are those of transformers",
        choices=("varlen", "sdpa", "eager", "flash_attention_2"),
    )
    packing_samples: bool = flag(False, "Lay sequences end to end in one row, without padding")
    value_head_prefix: str = flag("score", "Name of the scalar head of critic and reward model")


@dataclass
class ForwardConfig(AttentionConfig, PrecisionConfig):
    """Precision and attention"""


@dataclass
class ServedModelConfig(AttentionConfig, OwnPrecisionConfig):
    """Precision and attention"""


@dataclass
class DeepSpeedConfig(ForwardConfig):
    """DeepSpeed, precision, attention"""

    zero_stage: int = flag(2, "ZeRO stage of DeepSpeed", choices=(0, 1, 2, 3), resume=FIXED)
    adam_offload: bool = flag(False, "Keep the optimiser state in host memory")
    overlap_comm: bool = flag(False, "Overlap gradient reduction with the backward pass")
    zpg: int = flag(1, "Size of the secondary partition of ZeRO++ (stage 3)", ge=1)
    grad_accum_dtype: str = flag(
        "fp32",
        "Type in which the gradients of a step's micro-batches are added up; bf16 halves their memory, but the error "
        "of the sum grows with the number of micro-batches",
        choices=("fp32", "bf16"),
    )
    use_liger_kernel: bool = flag(False, "Use Liger's fused layer kernels in trained models (GPU)")
    load_in_4bit: bool = flag(
        False, "QLoRA: keep the weights that LoRA freezes in 4 bits (nf4, double quantisation)", resume=FIXED
    )
    lora: LoRAConfig = group(LoRAConfig)


@rule
def zero_stage_fits(run: AnyTrainedRun) -> Iterator[Problem]:
    stage = run.ds.zero_stage
    for name, is_on, least in (
        ("adam_offload", run.ds.adam_offload, 1),
        ("zpg", run.ds.zpg > 1, 3),
    ):
        if is_on and stage < least:
            yield Problem(
                f"ds.{name}", f"needs ds.zero_stage={least} or more, but it is {stage}", f"write ds.zero_stage={least}"
            )
    if run.ds.overlap_comm and stage != 2:
        what = f"works only with ds.zero_stage=2, but it is {stage}"
        yield Problem("ds.overlap_comm", what, "write ds.zero_stage=2, or ds.overlap_comm=false")
    if stage == 0 and run.ds.param_dtype == "bf16":
        what = "keeps no fp32 master weights, and a bf16 weight does not move by a small update"
        yield Problem("ds.zero_stage", f"0 with bf16 {what}", "write ds.zero_stage=1, or ds.param_dtype=fp32")
    if run.ds.grad_accum_dtype == "bf16" and run.ds.param_dtype == "fp32":
        what = "bf16 would round the gradients of fp32 parameters"
        yield Problem("ds.grad_accum_dtype", what, "write ds.grad_accum_dtype=fp32, or ds.param_dtype=bf16")


@rule
def four_bits_fit(run: AnyTrainedRun) -> Iterator[Problem]:
    key = "ds.load_in_4bit"
    if not run.ds.load_in_4bit:
        return
    if run.ds.lora.rank == 0:
        yield Problem(key, "4-bit weights cannot be trained themselves", "add ds.lora.rank=<rank>")
    elif run.ds.zero_stage == 3:
        what = "ZeRO-3 cannot partition 4-bit weights (ds.zero_stage=3)"
        yield Problem(key, what, "write ds.zero_stage=2, or ds.load_in_4bit=false")
    elif find_spec("bitsandbytes") is None:
        yield Problem(key, "the package bitsandbytes is not installed", "run pip install 'rlhf-suite[qlora]'")


@rule
def liger_fits(run: AnyTrainedRun) -> Iterator[Problem]:
    key = "ds.use_liger_kernel"
    if run.ds.use_liger_kernel and run.launch.device == "cpu":
        yield Problem(key, "its kernels need a GPU (launch.device=cpu)", f"write {key}=false")
    elif run.ds.use_liger_kernel and find_spec("liger_kernel") is None:
        yield Problem(key, "the package liger-kernel is not installed", "run pip install 'rlhf-suite[liger]'")


@rule
def attention_fits(run: AnyTrainedRun | ServeRMRun) -> Iterator[Problem]:
    key, name = "ds.attn_implementation", run.ds.attn_implementation
    if name in ("sdpa", "eager") and run.ds.packing_samples:
        what = f"{name} would let packed sequences see each other (ds.packing_samples=true)"
        yield Problem(key, what, f"write {key}=varlen")
    if name == "flash_attention_2" and run.ds.param_dtype == "fp32":
        yield Problem(key, "flash attention has no fp32 kernels", f"write {key}=varlen, or ds.param_dtype=bf16")
    if name == "flash_attention_2" and run.launch.device == "cpu":
        yield Problem(key, "flash attention needs a GPU (launch.device=cpu)", f"write {key}=varlen")


@rule
def policy_is_not_drawn(run: PPORun) -> Iterator[Problem]:
    if run.ds.lora.rank > 0 and run.ds.lora.dropout > 0:
        what = f"{run.ds.lora.dropout} would train a different policy in every forward pass than the one that sampled"
        yield Problem("ds.lora.dropout", what, "write ds.lora.dropout=0.0")
