"""The moving average of a trained model's weights: divided among the ranks, saved, and exported in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_suite.train.checkpoint_files import Entries
from rlhf_suite.train.parts import local_part, write_parts
from rlhf_suite.train.strategy import TrainedModel

AVERAGE = "average"


class WeightAverage:
    """ema <- beta ema + (1 - beta) weight after each optimiser step, in float32 on the CPU; it starts at the weights.

    Under ZeRO-3 every rank averages its own part of every parameter. Otherwise all ranks have all parameters, and each
    averages some of them; with tensor parallelism, all of its own. Only `in_place` brings them together.
    Parameters that are not trained are left out: their average is what they are.
    """

    def __init__(self, model: TrainedModel, beta: float) -> None:
        self.model, self.beta = model, beta
        self.is_shared_out = model.ds.zero_stage != 3 and model.world.mesh.tensor == 1 and model.world.mesh.size > 1
        parts = self.parts()
        sizes = {name: part.numel() for name, (_, part) in parts.items()}
        self.owners = share_out(sizes, model.world.mesh.size) if self.is_shared_out else {}
        own = model.replica
        mine = {name: part for name, (_, part) in parts.items() if self.owners.get(name, own) == own}
        self.average = {name: part.float().cpu().clone() for name, part in mine.items()}

    def parts(self) -> dict[str, tuple[int, Tensor]]:
        """Return where this rank's part of each trained parameter starts, and the part, flattened."""
        named = self.model.module.named_parameters()
        return {name: local_part(p) for name, p in named if p.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the weights after an optimiser step."""
        parts = self.parts()
        for name, average in self.average.items():
            average.mul_(self.beta).add_(parts[name][1].cpu(), alpha=1 - self.beta)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average, rounded to the precision of the model, in place of its weights. Every rank enters it."""
        parameters = {name: part for name, (_, part) in self.parts().items()}
        weights = {name: part.to("cpu", copy=True) for name, part in parameters.items()}
        try:
            self._put(parameters, self.average)
            for name, owner in self.owners.items():
                dist.broadcast(parameters[name], src=owner)
            yield
        finally:
            self._put(parameters, weights)

    @torch.no_grad()
    def _put(self, parameters: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)
        self.model.forget_gathered()

    def save_state(self, folder: Path) -> Entries:
        """Write this rank's part of a checkpoint, and return what the manifest says of it."""
        replica = self.model.replica
        if not self.average or (replica != 0 and self.model.ds.zero_stage != 3 and not self.is_shared_out):
            return {}
        starts = {name: start for name, (start, _) in self.parts().items()}
        return write_parts(
            folder / f"{self.model.files('ema')}_{replica}.pt",
            {name: (starts[name], {AVERAGE: average}, {}) for name, average in self.average.items()},
        )

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote, on any number of ranks and at any ZeRO stage."""
        saved, parts = self.model.load_parts(folder, "ema"), self.parts()
        saved.check_names(parts)
        for name, average in self.average.items():
            saved.read(name, AVERAGE, parts[name][0], average)


def share_out(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return which of so many ranks has each of the named parameters, the largest first, so that all have a like number
    of elements."""
    owners, loads = dict[str, int](), [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners
