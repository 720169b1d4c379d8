"""The sections of `task=merge_lora`: which model, which adapter, where to, and in which precision."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag


@dataclass
class BaseModelConfig:
    """The model that the adapter was trained on"""

    model_name_or_path: str | None = flag(None, "HF folder or hub name, or builtin:<name>")


@dataclass
class AdapterConfig:
    """The adapter"""

    path: str | None = flag(None, "Folder of a LoRA adapter in peft's format (ckpt.save_adapter writes one)")


@dataclass
class MergedConfig:
    """The merged model"""

    output_dir: str | None = flag(None, "The merged model in HF format; null: <run folder>/model")


@dataclass
class MergedPrecisionConfig:
    """Precision"""

    param_dtype: str | None = flag(None, "Of the merged model; null: the base's own", choices=("bf16", "fp32"))
