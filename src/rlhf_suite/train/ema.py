"""The moving average of a trained model's weights: kept as it is partitioned, saved, and exported in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rlhf_suite.train.checkpoint_files import Entries
from rlhf_suite.train.parts import local_part, write_parts
from rlhf_suite.train.strategy import TrainedModel

AVERAGE = "average"


class WeightAverage:
    """ema <- beta ema + (1 - beta) weight after each optimiser step, in float32 on the CPU; it starts at the weights.

    Under ZeRO-3 every rank averages its own part of every parameter, otherwise all of it: no collective is needed.
    Parameters that are not trained are left out: their average is what they are.
    """

    def __init__(self, model: TrainedModel, beta: float) -> None:
        self.model, self.beta = model, beta
        self.average = {name: part.float().cpu().clone() for name, (_, part) in self.parts().items()}

    def parts(self) -> dict[str, tuple[int, Tensor]]:
        """Return where this rank's part of each trained parameter starts, and the part, flattened."""
        named = self.model.module.named_parameters()
        return {name: local_part(p) for name, p in named if p.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the weights after an optimiser step."""
        for name, (_, weight) in self.parts().items():
            self.average[name].mul_(self.beta).add_(weight.float().cpu(), alpha=1 - self.beta)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average, rounded to the precision of the model, in place of its weights. Every rank enters it."""
        parameters = {name: part for name, (_, part) in self.parts().items()}
        weights = {name: part.cpu().clone() for name, part in parameters.items()}
        try:
            self._put(parameters, self.average)
            yield
        finally:
            self._put(parameters, weights)

    @staticmethod
    @torch.no_grad()
    def _put(parameters: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        for name, part in parameters.items():
            part.copy_(values[name])

    def save_state(self, folder: Path) -> Entries:
        """Write this rank's part of a checkpoint, and return what the manifest says of it."""
        replica = self.model.replica
        if replica != 0 and self.model.ds.zero_stage != 3:
            return {}
        return write_parts(
            folder / f"{self.model.files('ema')}_{replica}.pt",
            {name: (start, {AVERAGE: self.average[name]}, {}) for name, (start, _) in self.parts().items()},
        )

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote, on any number of ranks and at any ZeRO stage."""
        saved, parts = self.model.load_parts(folder, "ema"), self.parts()
        saved.check_names(parts)
        for name, (start, _) in parts.items():
            saved.read(name, AVERAGE, start, self.average[name])
