"""Cases and outputs of the reference implementations (see README.md) as float64 tensors; how far ours are from them.

`AGREEMENT` remembers every comparison of this process: `python benchmarks/oracles.py` runs the tests and prints it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DATA, SUPERVISED = (json.loads((Path(__file__).parent / f"{name}.json").read_text()) for name in ("rl", "supervised"))
KINDS = tuple(DATA["kinds"])  # of each case: "contiguous", "gaps" or "empty row"
ROWS, STEPS = 8, 10
SEGMENTS = torch.arange(ROWS).repeat_interleave(STEPS)  # of the ragged view of a case


class Agreement:
    """The largest difference from each reference: in comparisons that must agree, and in those that must not."""

    def __init__(self) -> None:
        self.reference = ""  # whose cases were asked for last
        self.errors: dict[str, float] = {}
        self.on_purpose: dict[str, float] = {}

    def add(self, into: dict[str, float], difference: Tensor) -> None:
        largest = float(difference.abs().max()) if difference.numel() else 0.0
        into[self.reference] = max(into.get(self.reference, 0.0), largest)


AGREEMENT = Agreement()


class Case(NamedTuple):
    """One set of inputs, and what a reference made of it."""

    kind: str
    fields: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def flat(self, name: str) -> Tensor:
        return self.fields[name].flatten()


def cases(reference: str, *kinds: str) -> list[Case]:
    """The cases of these kinds (all without any) with the outputs of `reference`."""
    AGREEMENT.reference = reference
    found = [
        Case(kind, tensors(fields), tensors(outputs))
        for kind, fields, outputs in zip(KINDS, DATA["cases"], DATA["references"][reference], strict=True)
        if not kinds or kind in kinds
    ]
    assert found, kinds
    return found


def supervised_cases(reference: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(inputs, outputs) of a reference of the supervised tasks, case by case."""
    AGREEMENT.reference = reference
    found = SUPERVISED["references"][reference]
    inputs = SUPERVISED["cases"][found["case"]]
    return [(tensors(case), tensors(out)) for case, out in zip(inputs, found["outputs"], strict=True)]


def tensors(values: dict) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def check(ours: Tensor, theirs: Tensor, mask: Tensor | None = None) -> None:
    """Equal to 1e-6 (the references computed in float32), where the mask is 1."""
    if mask is not None:
        ours, theirs = ours.view_as(theirs) * mask, theirs * mask
    AGREEMENT.add(AGREEMENT.errors, ours.detach() - theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def gap(ours: Tensor, theirs: Tensor, mask: Tensor) -> float:
    """Largest difference where the mask is 1: of references that differ on purpose."""
    difference = (ours.detach() - theirs) * mask
    AGREEMENT.add(AGREEMENT.on_purpose, difference)
    return float(difference.abs().max())
