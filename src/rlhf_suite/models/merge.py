"""Merging a LoRA adapter into its base model: a whole Hugging Face folder that needs no peft."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, PeftType, TaskType, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_suite.disk import written_aside
from rlhf_suite.errors import UserError
from rlhf_suite.models.load import DTYPES, loading, model_folder, quiet_transformers, some, tokenizer_of

BASE, ADAPTER = "actor.model_name_or_path", "lora.path"
WEIGHTS = "adapter_model.safetensors"
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
HEAD = "base_model.model.score.weight"  # of a reward model, in an adapter's file


@dataclass(frozen=True)
class Adapter:
    """An adapter in peft's format."""

    path: Path
    config: LoraConfig
    weights: dict[str, Tensor]

    @property
    def is_scalar(self) -> bool:
        """Whether it belongs to a sequence classifier: a reward model."""
        return self.config.task_type == TaskType.SEQ_CLS or HEAD in self.weights


def read_adapter(path: str) -> Adapter:
    """The adapter in the folder `path`."""
    folder = Path(path)
    if not (folder / WEIGHTS).exists():
        raise UserError(
            f"{ADAPTER}={path}: there is no {WEIGHTS}. Give the folder of an adapter in peft's safetensors format"
        )
    try:
        config = LoraConfig.from_pretrained(folder)
        weights = load_file(folder / WEIGHTS)
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        raise UserError(f"{ADAPTER}={path}: cannot be read ({error}). Is the folder complete?") from error
    if config.peft_type != PeftType.LORA:
        raise UserError(f"{ADAPTER}={path}: holds an adapter of type {config.peft_type}; only LORA can be merged")
    return Adapter(folder, config, weights)


def merge_lora(base: str, adapter: Adapter, output: Path, dtype: str | None, say: Callable[[str], None]) -> int:
    """Write the merged model to `output`, whole or not at all; how many layers had an adapter.

    W + scale * B A is added up in fp32, then rounded once to `dtype` (null: the base's own).
    """
    folder = model_folder(base, BASE)
    say(f"Loading {base}")
    model, own = load_base(folder, base, adapter)
    if trained_elsewhere(adapter, base):
        say(f"The adapter was trained on {adapter.config.base_model_name_or_path}")
    say(f"Merging {adapter.path}")
    was_tied = model.config.get_text_config().tie_word_embeddings
    count = merge(model, adapter, base)
    if was_tied and not model.config.tie_word_embeddings:
        say("The adapter changes only one of embedding and head: the merged model has a matrix for each")
    trained_with = (adapter.path / "tokenizer_config.json").exists()  # it may have more tokens than the base's
    tokenizer = tokenizer_of(str(adapter.path) if trained_with else folder, base, BASE)
    model.config.pad_token_id = tokenizer.pad_token_id
    say("Writing the merged model")
    with written_aside(output) as aside:
        model.to(own if dtype is None else DTYPES[dtype]).save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    return count


def load_base(folder: str, base: str, adapter: Adapter) -> tuple[PreTrainedModel, torch.dtype]:
    """The base model in fp32, with the head that the adapter belongs to; and the type of its file."""
    with loading(BASE, base), quiet_transformers():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        settings: dict[str, Any] = {
            "dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True,
        }  # fmt: skip
        if adapter.is_scalar:
            if HEAD in adapter.weights:
                settings["num_labels"] = len(adapter.weights[HEAD])
            model, info = AutoModelForSequenceClassification.from_pretrained(folder, **settings)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(folder, **settings)
    missing = set(info["missing_keys"]) - ({"score.weight"} if HEAD in adapter.weights else set())
    if missing:
        raise UserError(f"{BASE}={base}: the checkpoint does not hold {some(sorted(missing))}. Give a complete model")
    for name in ("reward_mean", "reward_std"):  # of scores that the merged model does not give
        if hasattr(model.config, name):
            delattr(model.config, name)
    return model, config.dtype or torch.float32


def merge(model: PreTrainedModel, adapter: Adapter, base: str) -> int:
    """Merge in place; how many layers had an adapter.

    Raises:
        UserError: the adapter does not fit the model in every tensor; peft itself would pass over some of them.
    """
    from peft.tuners.lora import LoraLayer

    was_tied = untie(model)
    try:
        wrapped = PeftModel.from_pretrained(model, str(adapter.path), config=adapter.config)
    except (ValueError, RuntimeError) as error:
        raise wrong_base(base, adapter, str(error).splitlines()[-1].strip()) from error
    expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    if absent := sorted(expected.keys() - adapter.weights.keys()):
        raise wrong_base(base, adapter, f"the adapter does not hold {some(absent)}")
    if surplus := sorted(adapter.weights.keys() - expected.keys() - wrapped.state_dict().keys()):
        raise wrong_base(base, adapter, f"the model has no place for {some(surplus)}")
    adapted = {int(number) for name in expected for number in LAYER.findall(name)}
    layers = model.config.get_text_config().num_hidden_layers
    if trained_elsewhere(adapter, base) and adapted and max(adapted) + 1 < layers:
        raise wrong_base(base, adapter, f"the model has {layers} layers, the adapter is for {max(adapted) + 1}")
    count = sum(isinstance(module, LoraLayer) for module in wrapped.modules())
    try:
        wrapped.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise UserError(f"{ADAPTER}={adapter.path}: {error}") from error
    if was_tied:
        tie_if_equal(model)
    return count


def trained_elsewhere(adapter: Adapter, base: str) -> bool:
    """Whether the adapter names another base model; the same one may lie in another folder."""
    return adapter.config.base_model_name_or_path not in (None, base, model_folder(base, BASE))


def wrong_base(base: str, adapter: Adapter, reason: str) -> UserError:
    trained_on = adapter.config.base_model_name_or_path or "an unnamed model"
    return UserError(
        f"{ADAPTER}={adapter.path} does not fit {BASE}={base}: {reason}. The adapter was trained on {trained_on}: "
        "give that model"
    )


def untie(model: PreTrainedModel) -> bool:
    """Give a head that shares the embedding's matrix a copy of its own, for an adapter of one is none of the other;
    whether it did share it."""
    head = model.get_output_embeddings()
    if head is None:
        return False
    head, embedding = (getattr(layer, "base_layer", layer) for layer in (head, model.get_input_embeddings()))
    if head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(head.weight.detach().clone())
    set_tied(model, False)  # as long as they are apart; peft warns of any model that says otherwise
    return True


def set_tied(model: PreTrainedModel, tied: bool) -> None:
    """Write into the configuration whether head and embedding share a matrix."""
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = tied


def tie_if_equal(model: PreTrainedModel) -> None:
    """Share the matrix again where merging left both the same; else the model is tied no longer."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = torch.equal(head.weight, embedding.weight)
    if tied:
        head.weight = embedding.weight
    set_tied(model, tied)
