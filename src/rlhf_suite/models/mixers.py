"""Layers that carry a state from token to token, in packed rows: linear attention, short convolutions, Mamba.

transformers hands the borders of packed sequences to the kernels of these layers; its own code for them, and some of
the kernels, ignore borders without a word. So here such a layer runs on each sequence as if it were alone: once for
each run of neighbouring sequences of equal length. It does so when the layout of the row stands in the place of its
padding mask, which is how the layout reaches it, also when gradient checkpointing runs a layer again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_suite.models.attention import SequenceLayout
from rlhf_suite.models.families import CONVOLUTION, FULL, LINEAR, SLIDING, Family

Forward = Callable[..., Tensor]


def prepare_mixers(model: PreTrainedModel, family: Family) -> None:
    """Have the layers of a model that carry a state take the layout of a packed row in place of a padding mask."""
    for kind in {type(module) for module in model.modules() if type(module).__name__ in family.mixers}:
        if not hasattr(kind.forward, "takes_layouts"):
            kind.forward = per_sequence(kind.forward)


def masks_of(sequences: SequenceLayout) -> dict[str, SequenceLayout | None]:
    """Return the mask of a packed row for each kind of layer: the layout for layers that carry a state."""
    return {FULL: None, SLIDING: None, LINEAR: sequences, CONVOLUTION: sequences}


def per_sequence(forward: Forward) -> Forward:
    """Return the forward pass of a layer, which splits a packed row [1, T, H] at the borders of a layout."""

    @wraps(forward)
    def split(module: nn.Module, hidden_states: Tensor, *args: Any, **inputs: Any) -> Tensor:
        layout = inputs.get("attention_mask")
        if not isinstance(layout, SequenceLayout):
            return forward(module, hidden_states, *args, **inputs)
        inputs["attention_mask"] = None
        parts = hidden_states[0].split([count * length for count, length in layout.runs])
        outputs = [
            forward(module, part.unflatten(0, run), *args, **inputs).flatten(0, 1)
            for run, part in zip(layout.runs, parts, strict=True)
        ]
        return torch.cat(outputs)[None]

    split.takes_layouts = True  # type: ignore[attr-defined]
    return split
