"""The rehearsal of an export: all of a model's folder but the values of its weights, before anything is trained.

What a base model lacks or contradicts shows here, and not when its training is over.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from rlhf_suite.config.declarations.launch import trusts_code
from rlhf_suite.disk import DiskError, full_reason
from rlhf_suite.errors import UserError
from rlhf_suite.models.classes import auto_class, build_from_config
from rlhf_suite.models.families import family_of
from rlhf_suite.models.load import Tokenizer
from rlhf_suite.models.load_errors import list_tensors, quiet_transformers
from rlhf_suite.models.save import FolderParts, get_embedding_name
from rlhf_suite.models.weights import pieces, weight_shapes

SAMPLE = "Two trains: 12:05 and 7 o'clock.\n\tPrüfung <b>x</b>"


def rehearse(parts: FolderParts, *, whole: bool = True) -> list[str]:
    """Write the folder of a model without its weights, load it again, and compare. Return a sentence for each
    thing that was mended.

    Names and shapes of the weights are compared with those of a model that transformers makes from the folder, if the
    matrices are `whole` (tensor parallelism splits them) and the model is one of its own. It takes no memory.

    Raises:
        UserError: the trained model could not be saved, or not be loaded again.
        DiskError: the disk of temporary files is full.
    """
    base = parts.model.config._name_or_path
    try:
        shapes = weight_shapes(parts.model)
        with tempfile.TemporaryDirectory(prefix="rlhf-suite-rehearsal-") as place, quiet_transformers():
            if problems := parts.write(Path(place)):
                raise UserError("; ".join(problems))
            check_tokenizer(parts.tokenizer, place)
            config = AutoConfig.from_pretrained(place, trust_remote_code=trusts_code())
            if whole and parts.model._auto_class is None:
                check_shapes(parts, shapes, config)
    except Exception as error:
        temporary = Path(tempfile.gettempdir())
        if (reason := full_reason(error, temporary)) is not None:
            raise DiskError(f"{temporary} (TMPDIR) cannot be written: {reason}") from error
        raise refusal(base, error) from error
    return changes(parts)


def refusal(base: str, error: Exception) -> UserError:
    """Return the error for a model that could be trained and not be saved."""
    reason = str(error).strip() or type(error).__name__
    return UserError(
        f"{base}: a model that is trained from it could not be saved and loaded again: {reason.splitlines()[0]}. "
        "Correct the files of that folder, or choose another model"
    )


def changes(parts: FolderParts) -> list[str]:
    """Return what the folder of the trained model has otherwise than that of its base, because it must."""
    differences = []
    if getattr(parts.model, "generation_config", None) is not None:
        _, said = parts.generation_config()
        differences += [said] if said else []
    return differences


def check_tokenizer(tokenizer: Tokenizer, folder: str) -> None:
    """Raise UserError if the tokenizer in the folder gives other tokens."""
    again = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code())
    for aspect, one, other in (
        ("number of tokens", len(tokenizer), len(again)),
        ("tokens of a text", tokenizer(SAMPLE)["input_ids"], again(SAMPLE)["input_ids"]),
        ("EOS token", tokenizer.eos_token_id, again.eos_token_id),
        ("padding token", tokenizer.pad_token_id, again.pad_token_id),
        ("chat template", tokenizer.chat_template, again.chat_template),
    ):
        if one != other:
            raise UserError(f"the tokenizer has another {aspect} when it is saved and loaded ({other!r} for {one!r})")


def check_shapes(parts: FolderParts, shapes: dict[str, list[int]], config: Any) -> None:
    """Raise UserError if a model of this configuration has not the tensors that would be saved."""
    with torch.device("meta"):
        kind = auto_class("value" if parts.scores else "lm", family_of(config.to_dict()).images is not None, config)
        made = build_from_config(kind, config)
    expected = {piece.name: list(piece.tensors[0].shape) for piece in pieces(made)}
    name = get_embedding_name(parts.model)
    shapes = shapes | {name: [parts.rows, *shapes[name][1:]]}
    if absent := sorted(expected.keys() - shapes.keys()):
        raise UserError(f"the saved weights would lack {list_tensors(absent)}")
    if surplus := sorted(shapes.keys() - expected.keys()):
        raise UserError(f"its configuration has no place for {list_tensors(surplus)}")
    for name, shape in expected.items():
        if shape != shapes[name]:
            raise UserError(f"{name} has the shape {shapes[name]}, and by its configuration {shape}")
