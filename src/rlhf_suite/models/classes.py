"""The classes of transformers that models are loaded with, and the score heads that it lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_layers import GenericForSequenceClassification

from rlhf_suite.config.declarations.launch import trusts_code
from rlhf_suite.models.families import CARRIES, PACKED, SEQUENCE, TENSOR, Family, family_of


def auto_class(head: Literal["lm", "value"], sees: bool, config: PretrainedConfig) -> Any:
    """Return the class of transformers that loads a model."""
    if head == "value":
        return scorer_class(config, sees)
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def family_with_code(folder: str, config: PretrainedConfig) -> Family:
    """Return the family of the model in a folder, also by its class where that is code of the folder: only this says
    whether layers that no declaration knows carry a state."""
    family = family_of(config.to_dict())
    names = getattr(config, "auto_map", None) or {}
    classes = [name for kind, name in names.items() if kind.startswith("AutoModel")] if trusts_code() else []
    if family.mixers or not any(get_class_from_dynamic_module(name, folder)._is_stateful for name in classes):
        return family
    return replace(family, refused={**family.refused, **dict.fromkeys((PACKED, SEQUENCE, TENSOR), CARRIES)})


def scorer_class(config: PretrainedConfig, sees: bool) -> Any:
    """Return the class of a model that has one number per token. transformers has such classes for some types; those of
    the others are made as it makes these."""
    kind = type(config)
    if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[kind]
    if kind not in MODEL_MAPPING:  # a type of the folder's own code
        return AutoModelForSequenceClassification
    base = MODEL_MAPPING[kind]
    common = next(parent for parent in base.__mro__ if parent.__name__.endswith("PreTrainedModel"))
    name = f"{base.__name__.removesuffix('Model')}ForSequenceClassification"
    writer = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING)[kind]
    conversions = get_checkpoint_conversion_mapping(writer.__name__)
    if conversions is not None:  # tensors have the names that they have in the language model
        register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    own = {"__module__": base.__module__, "config_class": kind}
    return type(name, (GenericForSequenceClassification, common), own)


def build_from_config(kind: Any, config: PretrainedConfig, **settings: Any) -> Any:
    """Return a model of a class that `auto_class` returns, with new weights."""
    if issubclass(kind, PreTrainedModel):
        return kind._from_config(config, **settings)
    return kind.from_config(config, trust_remote_code=trusts_code(), **settings)
