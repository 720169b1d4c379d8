"""Merging a LoRA adapter into its base model, as a whole Hugging Face folder that does not need peft."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, PeftType, TaskType, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from rlhf_suite.config.declarations.launch import trusts_code
from rlhf_suite.errors import UserError
from rlhf_suite.models import prompt_format
from rlhf_suite.models.classes import auto_class
from rlhf_suite.models.families import family_of
from rlhf_suite.models.load import DTYPES, model_folder, tokenizer_of
from rlhf_suite.models.load_errors import explain_load_errors, find_misfit, list_tensors, quiet_transformers
from rlhf_suite.models.rehearsal import rehearse
from rlhf_suite.models.save import FolderParts, save_folder
from rlhf_suite.models.vision import VisionProcessor
from rlhf_suite.models.weights import find_changed_ties, iterate_merged

BASE, ADAPTER = "actor.model_name_or_path", "lora.path"
WEIGHTS = "adapter_model.safetensors"
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
HEAD = "base_model.model.score.weight"  # the head of a reward model, in the file of an adapter


class Merged(NamedTuple):
    """What was merged: how many modules, and a sentence for each part that the model's folder lacks."""

    modules: int
    lacking: list[str]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in peft's format."""

    path: Path
    config: LoraConfig
    weights: dict[str, Tensor]

    @property
    def is_scalar(self) -> bool:
        """Return whether it belongs to a sequence classifier, that is, a reward model."""
        return self.config.task_type == TaskType.SEQ_CLS or HEAD in self.weights


def read_adapter(path: str) -> Adapter:
    """Return the adapter in the folder `path`.

    Raises:
        UserError: the folder does not hold a LoRA adapter.
    """
    folder = Path(path)
    if not (folder / WEIGHTS).exists():
        raise UserError(
            f"{ADAPTER}={path}: the folder has no {WEIGHTS}. Give the folder of an adapter in peft's safetensors format"
        )
    try:
        config = LoraConfig.from_pretrained(folder)
        weights = load_file(folder / WEIGHTS)
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        raise UserError(f"{ADAPTER}={path}: cannot be read ({error}). Check that the folder is complete") from error
    if config.peft_type != PeftType.LORA:
        raise UserError(f"{ADAPTER}={path}: holds an adapter of type {config.peft_type}; only LORA can be merged")
    return Adapter(folder, config, weights)


def merge_lora(base: str, adapter: Adapter, output: Path, dtype: str | None, log: Callable[[str], None]) -> Merged:
    """Write the merged model to `output`, whole or not at all.

    The weights of base and adapter are combined in fp32 by peft's own code, and then rounded once to `dtype` (None: the
    type of the base model).
    """
    folder = model_folder(base, BASE)
    log(f"Loading {base}")
    model, own = load_base(folder, base, adapter)
    if names_other_base(adapter, base):
        log(f"The adapter was trained on {adapter.config.base_model_name_or_path}")
    count = add_adapter(model, adapter, base)
    trained_with = (
        adapter.path / "tokenizer_config.json"
    ).exists()  # its tokenizer may have more tokens than that of the base
    tokenizer = tokenizer_of(str(adapter.path) if trained_with else folder, base, BASE)
    prompts = prompt_format.read(adapter.path) or prompt_format.read(Path(folder))
    sees = family_of(model.config.to_dict()).images is not None
    vision = VisionProcessor(folder, BASE, base) if sees else None
    vision = vision if vision is not None and vision.is_complete else None
    parts = FolderParts(model, tokenizer, vision=vision, dtype=own if dtype is None else DTYPES[dtype], prompts=prompts)
    for said in rehearse(parts):
        log(said)
    if find_changed_ties(model):
        log("The adapter changes only one of embedding and head: the merged model has a matrix for each")
    log(f"Merging {adapter.path}")
    weights = {name: merge_tensor(name, tensor, parts.dtype, adapter) for name, tensor in iterate_merged(model)}
    log("Writing the merged model")
    return Merged(count, save_folder(parts, weights, output))


def merge_tensor(name: str, tensor: Tensor, dtype: torch.dtype | None, adapter: Adapter) -> Tensor:
    """Return a merged tensor in the type in which it is saved.

    Raises:
        UserError: it has numbers that are not finite.
    """
    if not tensor.is_floating_point():
        return tensor.contiguous()
    if not tensor.isfinite().all():
        raise UserError(f"{ADAPTER}={adapter.path}: NaN or infinite numbers in {name} after merging. Is it broken?")
    return tensor.to(dtype).contiguous()


def load_base(folder: str, base: str, adapter: Adapter) -> tuple[PreTrainedModel, torch.dtype]:
    """Return the base model in fp32, with the head that the adapter belongs to, and the data type of its checkpoint."""
    with explain_load_errors(BASE, base), quiet_transformers():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code())
        settings: dict[str, Any] = {
            "dtype": torch.float32, "trust_remote_code": trusts_code(), "output_loading_info": True,
            "ignore_mismatched_sizes": True,  # `find_misfit` names them
        }  # fmt: skip
        if adapter.is_scalar and HEAD in adapter.weights:
            settings["num_labels"] = len(adapter.weights[HEAD])
        sees = family_of(config.to_dict()).images is not None
        kind = auto_class("value" if adapter.is_scalar else "lm", sees, config)
        model, info = kind.from_pretrained(folder, **settings)
    if (problem := find_misfit(info, may_lack=["score.weight"] if HEAD in adapter.weights else [])) is not None:
        raise UserError(f"{BASE}={base}: {problem}. Give a complete model with its own config.json")
    for name in ("reward_mean", "reward_std"):  # they describe scores that the merged model does not give
        if hasattr(model.config, name):
            delattr(model.config, name)
    return model, config.dtype or torch.float32


def add_adapter(model: PreTrainedModel, adapter: Adapter, base: str) -> int:
    """Put the adapter around the modules of the model. Return how many matrices it changes.

    Raises:
        UserError: the adapter does not fit the model in every tensor; peft itself would ignore some mismatches.
    """
    from peft.tuners.lora import LoraLayer

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(tied|tie_word_embeddings|weight_tying)")  # ties are seen to here
        try:
            wrapped = PeftModel.from_pretrained(model, str(adapter.path), config=adapter.config)
        except (ValueError, RuntimeError) as error:
            raise wrong_base(base, adapter, str(error).splitlines()[-1].strip()) from error
    expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    if absent := sorted(expected.keys() - adapter.weights.keys()):
        raise wrong_base(base, adapter, f"the adapter lacks {list_tensors(absent)}")
    if surplus := sorted(adapter.weights.keys() - expected.keys() - wrapped.state_dict().keys()):
        raise wrong_base(base, adapter, f"the model has no place for {list_tensors(surplus)}")
    adapted = {int(number) for name in expected for number in LAYER.findall(name)}
    layers = model.config.get_text_config().num_hidden_layers
    if names_other_base(adapter, base) and adapted and max(adapted) + 1 < layers:
        raise wrong_base(base, adapter, f"the model has {layers} layers, the adapter is for {max(adapted) + 1}")
    return sum(isinstance(module, LoraLayer) for module in wrapped.modules())


def names_other_base(adapter: Adapter, base: str) -> bool:
    """Return whether the adapter names another base model. The same model may be in another folder."""
    return adapter.config.base_model_name_or_path not in (None, base, model_folder(base, BASE))


def wrong_base(base: str, adapter: Adapter, reason: str) -> UserError:
    """Return the error for an adapter that does not fit its base model."""
    trained_on = adapter.config.base_model_name_or_path or "an unnamed model"
    return UserError(
        f"{ADAPTER}={adapter.path} does not fit {BASE}={base}: {reason}. The adapter was trained on {trained_on}: "
        "give that model"
    )
