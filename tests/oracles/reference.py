"""Cases and outputs of the reference implementations in `rl.json` (see README.md), as float64 tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DATA = json.loads((Path(__file__).parent / "rl.json").read_text())
KINDS = tuple(DATA["kinds"])  # of each case: "contiguous", "gaps" or "empty row"
ROWS, STEPS = 8, 10
SEGMENTS = torch.arange(ROWS).repeat_interleave(STEPS)  # of the ragged view of a case


class Case(NamedTuple):
    """One set of inputs, and what a reference made of it."""

    kind: str
    fields: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def flat(self, name: str) -> Tensor:
        return self.fields[name].flatten()


def cases(reference: str, *kinds: str) -> list[Case]:
    """The cases of these kinds (all without any) with the outputs of `reference`."""
    found = [
        Case(kind, tensors(fields), tensors(outputs))
        for kind, fields, outputs in zip(KINDS, DATA["cases"], DATA["references"][reference], strict=True)
        if not kinds or kind in kinds
    ]
    assert found, kinds
    return found


def tensors(values: dict) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def check(ours: Tensor, theirs: Tensor, mask: Tensor | None = None) -> None:
    """Equal to 1e-6 (the references computed in float32), where the mask is 1."""
    if mask is not None:
        ours, theirs = ours.view_as(theirs) * mask, theirs * mask
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def gap(ours: Tensor, theirs: Tensor, mask: Tensor) -> float:
    """Largest difference where the mask is 1: of references that differ on purpose."""
    return float(((ours - theirs) * mask).abs().max())
