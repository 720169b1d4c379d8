"""Hugging Face folders that transformers, peft and vLLM can load: the weights first, then each other part on its own.

A part that cannot be written does not cost the weights: a sentence says what the folder lacks, and what to do about it.
`rehearsal.py` writes all of a folder but its weights before a run trains.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from rlhf_suite.disk import disk_reason, write_aside
from rlhf_suite.models.dropout import set_dropout
from rlhf_suite.models.forward import LanguageModel, ScalarModel
from rlhf_suite.models.load import Tokenizer, choose_padding_token
from rlhf_suite.models.lora import ADAPTER, base_of
from rlhf_suite.models.prompt_format import FILE as PROMPTS
from rlhf_suite.models.prompt_format import PromptFormat
from rlhf_suite.models.vision import VisionProcessor
from rlhf_suite.models.weights import (
    Gather,
    dtype_of,
    find_changed_ties,
    weights_on_cpu,
    whole,
    without_values,
    write_weights,
)

PAD = "<|pad|>"  # the padding token of a model that scores, if its tokenizer has none
Extras = Callable[[], Mapping[str, Any]]


class Part(NamedTuple):
    """A part of a model's folder: what writes it, and the remedy if it cannot."""

    name: str
    write: Callable[[Path], object]
    remedy: str


@dataclass
class FolderParts:
    """What the folder of a model has beside its weights."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    dropout_off: Mapping[str, float] = field(default_factory=dict)  # rates that were switched off after loading
    vision: VisionProcessor | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)  # further entries of config.json
    prompts: PromptFormat | None = None  # that it was trained on
    dtype: torch.dtype | None = None  # of the weights; None: that of the model

    def __post_init__(self) -> None:
        self.tokenizer, self.rows = pad_tokenizer(self.tokenizer, num_rows(self.model), scores=self.scores)

    @classmethod
    def of(
        cls, model: LanguageModel | ScalarModel, tokenizer: Tokenizer, prompts: PromptFormat | None = None
    ) -> FolderParts:
        """Return the parts of a model of a run."""
        vision = model.vision if model.vision is not None and model.vision.is_complete else None
        return cls(model.model, tokenizer, model.dropout_off, vision, prompts=prompts)

    @property
    def scores(self) -> bool:
        """Return whether the model gives scores. transformers finds the last token of a row by its padding then."""
        return hasattr(self.model, "score")

    def write(self, folder: Path) -> list[str]:
        """Write every part that can be written. Return a sentence for each other one."""
        problems: list[str] = []
        for part in self.parts():
            with attempt(part.name, part.remedy, folder, problems):
                part.write(folder)
        return problems

    def parts(self) -> Iterator[Part]:
        """Yield the parts in the order in which they are written."""
        base = self.model.config._name_or_path
        yield Part("config.json", self.write_config, f"copy it from {base}")
        if getattr(self.model, "generation_config", None) is not None:
            remedy = "it is optional: write one by hand, with eos_token_id"
            yield Part("generation_config.json", self.write_generation_config, remedy)
        if self.vision is not None:
            yield Part("the image processor", self.vision.save, f"copy its files from {base}")
        yield Part("the tokenizer", self.tokenizer.save_pretrained, f"copy its files from {base}")
        if self.prompts is not None:
            yield Part(PROMPTS, self.prompts.write, f"write {self.prompts} on command lines that use the model")

    def write_config(self, folder: Path) -> None:
        """Write the configuration, and the code that the model came with (launch.trust_remote_code)."""
        config = self.config()
        if self.model._auto_class is not None:
            custom_object_save(self.model, folder, config)
        config.save_pretrained(folder)

    def write_generation_config(self, folder: Path) -> None:
        """Write the generation settings."""
        config, _ = self.generation_config()
        config.save_pretrained(folder)

    def config(self) -> PretrainedConfig:
        """Return the configuration to save."""
        config = copy.deepcopy(self.model.config)
        config.__dict__.pop("quantization_config", None)  # the folder's weights are whole
        config.architectures = [type(self.model).__name__]
        config.dtype = self.dtype or next(dtype_of(p) for p in self.model.parameters() if dtype_of(p).is_floating_point)
        config.pad_token_id = self.tokenizer.pad_token_id
        if self.rows > num_rows(self.model):
            config.get_text_config().vocab_size = self.rows
        if find_changed_ties(self.model):
            set_tied(config, False)
        set_dropout(config, dict(self.dropout_off))
        for name, value in self.extras.items():
            setattr(config, name, value)
        return config

    def generation_config(self) -> tuple[GenerationConfig, str | None]:
        """Return the model's generation settings, with the tokenizer's EOS among the tokens that end a generation; and
        a sentence about what had to be changed in them, because transformers saves no settings that contradict."""
        config = copy.deepcopy(self.model.generation_config)
        known = config.eos_token_id
        known = [] if known is None else [known] if isinstance(known, int) else list(known)
        ends = [*known, *([] if self.tokenizer.eos_token_id in known else [self.tokenizer.eos_token_id])]
        config.eos_token_id = ends[0] if len(ends) == 1 else ends
        config.pad_token_id = self.tokenizer.pad_token_id
        problem = contradiction(config)
        if problem is None:
            return config, None
        config, change = mend_settings(config)
        lines = [line.removeprefix("- ") for line in problem.splitlines() if line.startswith("- ")]
        origin = f"generation_config.json of {self.model.config._name_or_path}: {' '.join(lines) or problem}"
        return config, f"{origin} That of the trained model gets {change}"


def save_hf(
    model: LanguageModel | ScalarModel,
    tokenizer: Tokenizer,
    path: Path,
    *,
    state_dict: dict[str, Tensor] | None = None,
    extras: Extras = dict,
    prompts: PromptFormat | None = None,
) -> list[str]:
    """Write a model folder, with adapters merged into the weights. Return a sentence for each part that it lacks.

    `state_dict` has checkpoint names (`weights_on_cpu`); the default is the model's own weights. `extras` is called
    when the weights are written, and returns further entries of config.json, as plain JSON values.
    """
    weights = weights_on_cpu(model) if state_dict is None else state_dict
    return save_folder(FolderParts.of(model, tokenizer, prompts), weights, path, extras)


def save_folder(parts: FolderParts, weights: dict[str, Tensor], path: Path, extras: Extras = dict) -> list[str]:
    """Write a model folder: the weights, then each of the parts. Return a sentence for each part that it lacks."""
    problems: list[str] = []
    with write_aside(path) as folder:
        write_weights(with_rows(parts.model, weights, parts.rows), folder)
        with attempt("what the task adds to config.json", "see the log of the run", folder, problems):
            parts.extras = dict(extras())
        return problems + parts.write(folder)


@contextmanager
def attempt(part: str, remedy: str, folder: Path, problems: list[str]) -> Iterator[None]:
    """Add a sentence to `problems` if the block fails; but what the disk refuses, it refuses all parts."""
    try:
        yield
    except Exception as error:
        if disk_reason(error, folder) is not None:
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        problems.append(f"{part} could not be written ({type(error).__name__}: {reason}); {remedy}")


def save_adapter(
    model: LanguageModel | ScalarModel, tokenizer: Tokenizer, path: Path, *, gather: Gather = whole,
    is_main: bool = True, prompts: PromptFormat | None = None,
) -> list[str]:  # fmt: skip
    """Write only the LoRA adapter, in peft's format. Under ZeRO-3 every rank calls this and the main rank writes.
    Return a sentence for each part that the folder lacks."""
    assert model.lora is not None, "save_adapter needs a model with adapters"
    trained = {name: p for name, p in model.model.named_parameters() if p.requires_grad}
    with gather(list(trained.values())):
        copies = {name: p.detach().to("cpu", copy=True).contiguous() for name, p in trained.items()}
    if not is_main:
        return []
    weights = get_peft_model_state_dict(model.model, copies, ADAPTER, save_embedding_layers=False)
    config, problems = copy.deepcopy(model.lora), list[str]()
    config.inference_mode = True
    if isinstance(model, ScalarModel):
        config.modules_to_save = ["score"]
        weights |= {name: weight for name, weight in copies.items() if name.startswith("score.")}
    with write_aside(path) as folder:
        named = {f"base_model.model.{name}": weight for name, weight in weights.items()}
        save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        for name, part in (("adapter_config.json", config), ("the tokenizer", tokenizer)):
            with attempt(f"{name} of the adapter", "the merged model has all of it", folder, problems):
                part.save_pretrained(folder)
        if prompts is not None:
            with attempt(f"{PROMPTS} of the adapter", "the merged model has it", folder, problems):
                prompts.write(folder)
    return problems


def pad_tokenizer(tokenizer: Tokenizer, rows: int, *, scores: bool) -> tuple[Tokenizer, int]:
    """Return a tokenizer whose padding token the model has, and how many rows its embedding needs.

    A language model may be without one. A model that scores must have one that no text ends with, so it gets a row more
    where no token is left for that.
    """
    padding = tokenizer.pad_token_id
    if (padding is None and not scores) or (padding is not None and padding < rows):
        return tokenizer, rows
    tokenizer = copy.deepcopy(tokenizer)
    other = choose_padding_token(tokenizer, rows)
    if other is not None or not scores:
        tokenizer.pad_token = other
    elif padding is None:
        tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer, max(rows, 1 + (tokenizer.pad_token_id if tokenizer.pad_token_id is not None else -1))


def with_rows(model: PreTrainedModel, weights: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Return weights whose embedding has so many rows; those that it lacks are 0."""
    if rows <= num_rows(model):
        return weights
    (name,) = revert_weight_conversion(model, {get_embedding_name(model): without_values(get_embedding(model))})
    more = weights[name].new_zeros(rows - len(weights[name]), weights[name].shape[1])
    return weights | {name: torch.cat([weights[name], more])}


def num_rows(model: PreTrainedModel) -> int:
    """Return how many tokens a model has embeddings of."""
    return len(without_values(get_embedding(model)))


def get_embedding(model: PreTrainedModel) -> Tensor:
    """Return the matrix of the embedding, whatever adapter is around it."""
    weight = base_of(model.get_input_embeddings()).weight
    assert isinstance(weight, Tensor)
    return weight


def get_embedding_name(model: PreTrainedModel) -> str:
    """Return the name that the matrix of the embedding has in a model without adapters."""
    embedding = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)


def set_tied(config: PretrainedConfig, tied: bool) -> None:
    """Set in a configuration whether head and embedding share a matrix."""
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied


def contradiction(config: GenerationConfig) -> str | None:
    """Return the reason why transformers would not save these settings; None if it would."""
    try:
        config.validate(strict=True)
    except ValueError as error:
        return str(error)
    return None


def mend_settings(config: GenerationConfig) -> tuple[GenerationConfig, str]:
    """Return settings that transformers saves, and what was changed: sampling for settings of it, else those that are
    named in its complaint go, else all do but the tokens."""
    sampling = copy.deepcopy(config)
    sampling.do_sample = True
    complaint = contradiction(sampling)
    if complaint is None:
        return sampling, "do_sample=true"
    named = re.findall(r"^- `(\w+)`", complaint, re.MULTILINE)
    for name in named:
        setattr(sampling, name, None)
    if named and contradiction(sampling) is None:
        return sampling, f"no {', '.join(named)}"
    tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**tokens), "its tokens alone"
