"""One rank of a model that is trained: its state on disk and its export, whatever it is trained for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.distributed.workers import Worker
from rlhf_suite.models.save import save_adapter
from rlhf_suite.train.export import export
from rlhf_suite.train.strategy import TrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainedWorker(Worker):
    """Subclasses load `model` and `tokenizer`."""

    model: TrainedModel
    tokenizer: PreTrainedTokenizerBase

    def save_state(self, folder: Path) -> None:
        """This rank's part of a checkpoint."""
        self.model.save_state(folder)

    def load_state(self, folder: Path) -> None:
        """The inverse of `save_state`."""
        self.model.load_state(folder)

    def export(self, path: Path) -> None:
        """The model in HF format; rank 0 writes, every rank gathers."""
        export(self.model, self.tokenizer, path)

    def export_adapter(self, path: Path) -> None:
        """The LoRA adapter alone, in peft's format."""
        model = self.model
        save_adapter(model.module, self.tokenizer, path, gather=model.gathered, is_main=model.world.is_main)
        model.world.barrier()
