"""The moving average of a trained model's weights: kept as it is partitioned, saved, and exported in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rlhf_suite.train.strategy import TrainedModel, load_tensors


class WeightAverage:
    """ema <- beta ema + (1 - beta) weight after each optimiser step, in float32 on the CPU; it starts at the weights.

    Under ZeRO-3 every rank averages its own part of every parameter, otherwise all of it: no collective is needed.
    Parameters that are not trained are left out: their average is what they are.
    """

    def __init__(self, model: TrainedModel, beta: float) -> None:
        self.model, self.beta = model, beta
        self.average = {name: local_part(p).detach().float().cpu().clone() for name, p in self.trained()}

    def trained(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in self.model.module.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the weights after an optimiser step."""
        for name, parameter in self.trained():
            weight = local_part(parameter).detach().float().cpu()
            self.average[name].mul_(self.beta).add_(weight, alpha=1 - self.beta)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average, rounded to the precision of the model, in place of its weights. Every rank enters it."""
        parameters = {name: local_part(parameter) for name, parameter in self.trained()}
        weights = {name: part.detach().cpu().clone() for name, part in parameters.items()}
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

    def save_state(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint."""
        torch.save(self.average, folder / f"ema_{self.model.world.rank}.pt")

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote."""
        self.average = load_tensors(folder / f"ema_{self.model.world.rank}.pt")


def local_part(parameter: Tensor) -> Tensor:
    """Return what this rank has of a parameter: its part under ZeRO-3, else all of it."""
    part: Tensor = getattr(parameter, "ds_tensor", parameter)
    return part
