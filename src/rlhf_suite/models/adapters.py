"""The adapters of a model apart from its weights: what rollout engines get that hold the model already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.models.classes import auto_class, build_from_config
from rlhf_suite.models.families import ADAPTERS, EAGER, family_of
from rlhf_suite.models.forward import LanguageModel
from rlhf_suite.models.load import model_config, model_folder
from rlhf_suite.models.load_errors import quiet_transformers
from rlhf_suite.models.lora import ADAPTER, add_lora, base_of, find_adapted, parents
from rlhf_suite.models.weights import Gather, whole

NUMBER = re.compile(r"\.\d+\.")  # of a layer or an expert


@torch.no_grad()
def iterate_adapters(model: PreTrainedModel, gather: Gather = whole) -> Iterator[tuple[str, Tensor]]:
    """Yield (<module>.lora_A, A) and (<module>.lora_B, B) of every adapter: y = W x + B A x, so B has the scale of the
    adapter. `gather` is that of `iterate_weights`."""
    for name, module in find_adapted(model).items():
        layer: Any = module
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        with gather([down, up]):
            stem = stored_name(model, name)
            assert stem is not None, f"{name}: checked when the run began"
            yield f"{stem}.lora_A", down.detach()
            yield f"{stem}.lora_B", up.detach().float() * layer.scaling[ADAPTER]


def adapted_modules(path: str, flag: str, ds: DeepSpeedConfig) -> tuple[list[str], str | None]:
    """Return the names of the modules of a model that LoRA adapts, and why their adapters cannot be applied beside the
    weights by an engine; None if they can. The model is built without content."""
    model = model_without_content(path, flag, ds)
    if (why := model.family.why_not(ADAPTERS)) is not None:
        return [], f"{model.family.title} {why}"
    add_lora(model, ds.lora, 0)
    names = []
    for name, module in find_adapted(model.model).items():
        if (problem := kind_problem(name, module, model.model)) is not None:
            return [], problem
        names.append(name)
    return names, None


def unadapted_matrices(path: str, flag: str, ds: DeepSpeedConfig) -> list[str]:
    """Return the matrices of a model that get no adapter, with * for the numbers of layers. The model is built without
    content."""
    model = model_without_content(path, flag, ds)
    add_lora(model, ds.lora, 0)
    adapted = find_adapted(model.model)
    return numberless(name for name, _ in matrices(model.model) if not any(part in adapted for part in parents(name)))


def unquantised_matrices(path: str, flag: str, ds: DeepSpeedConfig) -> list[str]:
    """Return the matrices of a model that ds.load_in_4bit leaves as they are, with * for the numbers of layers:
    bitsandbytes replaces plain linear layers alone."""
    model = model_without_content(path, flag, ds)
    return numberless(name for name, module in matrices(model.model) if type(module) not in (nn.Linear, Conv1D))


def matrices(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names of the parameters that tokens are multiplied with, beside those of the head, with the module that
    each is in: no embeddings, and no kernels of convolutions."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and min(parameter.shape) > 1 and not leaf.endswith("bias"):
                yield f"{name}.{leaf}", module


def numberless(names: Iterable[str]) -> list[str]:
    """Return each name of a parameter once, with * for the numbers of layers."""
    return [*dict.fromkeys(NUMBER.sub(".*.", name.removesuffix(".weight")) for name in names)]


def model_without_content(path: str, flag: str, ds: DeepSpeedConfig) -> LanguageModel:
    """Return a model whose tensors have no memory."""
    with quiet_transformers(), torch.device("meta"):
        config = model_config(model_folder(path, flag), "lm", ds)
        sees = family_of(config.to_dict()).images is not None
        kind = auto_class("lm", sees, config)
        return LanguageModel(build_from_config(kind, config, attn_implementation=EAGER), False)


def kind_problem(name: str, module: nn.Module, model: PreTrainedModel) -> str | None:
    """Return why vLLM cannot apply an adapter beside the weights; None if it can: a plain one of a linear layer."""
    layer: Any = module
    if not isinstance(base_of(module), nn.Linear | Conv1D):
        return f"{name} ({type(base_of(module)).__name__}) is not a linear layer"
    if ADAPTER in layer.lora_variant or layer.lora_bias[ADAPTER]:
        return f"{name} has an adapter that is not a plain LoRA"
    return None if stored_name(model, name) is not None else f"{name} has another form in a checkpoint"


def stored_name(model: PreTrainedModel, name: str) -> str | None:
    """Return the name of a module in checkpoints; None if they have its weights in another form."""
    stored = list(revert_weight_conversion(model, {f"{name}.weight": torch.empty(2, 2, device="meta")}))
    return stored[0].removesuffix(".weight") if len(stored) == 1 and stored[0].endswith(".weight") else None
