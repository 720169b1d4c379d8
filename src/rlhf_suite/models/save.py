"""Hugging Face folders that transformers, peft and vLLM can load, written whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.dynamic_module_utils import custom_object_save

from rlhf_suite.disk import written_aside
from rlhf_suite.models.forward import LanguageModel, ScalarModel
from rlhf_suite.models.load import Tokenizer
from rlhf_suite.models.prepare import set_dropout
from rlhf_suite.models.weights import Gather, weights_on_cpu, whole, write_weights


def save_hf(
    model: LanguageModel | ScalarModel,
    tokenizer: Tokenizer,
    path: Path,
    *,
    state_dict: dict[str, Tensor] | None = None,
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Write a model folder, with adapters merged into the weights.

    `state_dict` has checkpoint names (`weights_on_cpu`); the default is the model's own weights. `extras` are further
    entries of config.json, as plain JSON values.
    """
    weights = weights_on_cpu(model) if state_dict is None else state_dict
    with written_aside(path) as folder:
        config = _config(model, tokenizer, weights, extras or {})
        if model.model._auto_class is not None:  # the code that the model came with (launch.trust_remote_code)
            custom_object_save(model.model, folder, config)
        config.save_pretrained(folder)
        if isinstance(model, LanguageModel):
            _generation_config(model, tokenizer).save_pretrained(folder)
            if model.vision is not None:
                model.vision.processor.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_weights(weights, folder)


def save_adapter(
    model: LanguageModel | ScalarModel, tokenizer: Tokenizer, path: Path, *, gather: Gather = whole,
    is_main: bool = True,
) -> None:  # fmt: skip
    """Write only the LoRA adapter, in peft's format. Under ZeRO-3 every rank calls this and the main rank writes."""
    assert model.lora is not None, "save_adapter needs a model with adapters"
    trained = {name: p for name, p in model.model.named_parameters() if p.requires_grad}
    with gather(list(trained.values())):
        weights = {
            "base_model.model." + name.replace(".default.", "."): p.detach().to("cpu", copy=True).contiguous()
            for name, p in trained.items()
        }
    if not is_main:
        return
    config = copy.deepcopy(model.lora)
    config.inference_mode = True
    if isinstance(model, ScalarModel):
        config.modules_to_save = ["score"]
    with written_aside(path) as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _config(
    model: LanguageModel | ScalarModel,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor],
    extras: Mapping[str, Any],
) -> PretrainedConfig:
    """Return the configuration to save."""
    config = copy.deepcopy(model.model.config)
    config.__dict__.pop("quantization_config", None)  # the folder's weights are whole
    config.architectures = [type(model.model).__name__]
    config.dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    config.pad_token_id = tokenizer.pad_token_id
    set_dropout(config, model.dropout_off)
    for name, value in extras.items():
        setattr(config, name, value)
    return config


def _generation_config(model: LanguageModel, tokenizer: Tokenizer) -> GenerationConfig:
    """Return the model's generation settings, with the tokenizer's EOS among the tokens that end a generation."""
    config = copy.deepcopy(model.model.generation_config)
    known = config.eos_token_id
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    ends = [*known, *([] if tokenizer.eos_token_id in known else [tokenizer.eos_token_id])]
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    config.pad_token_id = tokenizer.pad_token_id
    return config
