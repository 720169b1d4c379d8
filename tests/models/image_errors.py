"""How far a model that reads images is from transformers' own, one sequence at a time: log-probs, and gradients of
losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from family_errors import Gradients, gradients, largest, of_pairs, preference
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.data.batch import Example, TokenBatch, collate
from rlhf_suite.models.forward import LanguageModel, ScalarModel, sequence_scores, token_log_probs
from rlhf_suite.models.load import load_model
from vision import Seeing

Loss = Callable[[Tensor], Tensor]


def batch_of(seeing: Seeing) -> TokenBatch:
    """Sequences with one image, none, two and one, whose answers are trained on."""
    return collate(seeing.examples(), TokenBatch)


def answers(seeing: Seeing) -> Loss:
    """The loss of the tokens of the answers."""
    mask = batch_of(seeing).mask
    return lambda log_probs: -(log_probs * mask).sum()


def preferred(seeing: Seeing) -> Loss:
    """The loss of DPO for answers of neighbours, without a reference."""
    batch = batch_of(seeing)
    of_answers = partial(preference, lengths=batch.lengths.tolist())
    return lambda log_probs: of_answers(log_probs * batch.mask)


def inputs_alone(seeing: Seeing, example: Example) -> dict[str, Any]:
    """Return the inputs of transformers for a sequence."""
    ids = torch.tensor([example.ids])
    pixels = [seeing.processor.read(image.data).pixels for image in example.images or ()]
    more: dict[str, Any] = {name: torch.cat([p[name] for p in pixels]) for name in (pixels[0] if pixels else ())}
    family = seeing.processor.family
    if family.has_tile_rows:
        more = {name: tiles[None] for name, tiles in more.items()}
    if family.has_axes or family.sees_whole:
        name = "mm_token_type_ids" if family.has_axes else "token_type_ids"
        more[name] = (ids == seeing.processor.feature).int()
    return more | {"input_ids": ids, "use_cache": False}


def log_probs_alone(model: PreTrainedModel, seeing: Seeing) -> Tensor:
    """Return log-probs [T] of each sequence alone by the forward pass of transformers."""
    log_probs = []
    for example in seeing.examples():
        inputs = inputs_alone(seeing, example)
        logits = model(**inputs).logits[0].log_softmax(-1)
        log_probs.append(F.pad(logits[:-1].gather(1, inputs["input_ids"][0, 1:, None])[:, 0], (1, 0)))
    return torch.cat(log_probs)


def alone(seeing: Seeing, loss: Loss) -> tuple[Tensor, Gradients]:
    """Return log-probs [T] of each sequence alone by transformers' eager forward pass, and the gradients of a loss."""
    model = AutoModelForImageTextToText.from_pretrained(seeing.folder, dtype=torch.float32, attn_implementation="eager")
    log_probs = log_probs_alone(model.eval(), seeing)
    loss(log_probs).backward()
    return log_probs.detach(), gradients(model)


def ours(seeing: Seeing, packed: bool, loss: Loss) -> tuple[Tensor, Gradients]:
    """Return what `alone` returns, of the suite's forward pass of all sequences at once."""
    model: LanguageModel = seeing.model(packed, noise=0)
    log_probs = token_log_probs(model, batch_of(seeing)).log_probs
    loss(log_probs).backward()
    return log_probs.detach(), gradients(model.model)


def language_error(seeing: Seeing, packed: bool, loss: Loss) -> float:
    """Return the largest relative error of a gradient."""
    return largest(ours(seeing, packed, loss)[1], alone(seeing, loss)[1])


def scorer(folder: Path, packed: bool) -> ScalarModel:
    """Return the reward model of a folder."""
    return load_model(
        str(folder), head="value", ds=DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=packed)
    )


def scores_alone(model: ScalarModel, seeing: Seeing) -> Tensor:
    """Return the scores [B] of each sequence alone by the model of transformers in a reward model."""
    hf: Any = model.model
    hf.set_attn_implementation("eager")
    states = [hf.model(**inputs_alone(seeing, example)).last_hidden_state[0, -1] for example in seeing.examples()]
    return hf.score(torch.stack(states))[:, 0]


def score_error(seeing: Seeing, packed: bool) -> float:
    """Return the largest relative error of a gradient of a reward model."""
    model = scorer(seeing.folder, packed)
    of_pairs(sequence_scores(model, batch_of(seeing))).backward()
    found = gradients(model.model)
    model.zero_grad()
    of_pairs(scores_alone(model, seeing)).backward()
    return largest(found, gradients(model.model))
