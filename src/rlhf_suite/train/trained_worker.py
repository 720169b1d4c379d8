"""A model that is trained, whatever for: what each of its ranks does with its state on disk, and the handle on them."""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_suite.distributed.group import ModelGroup, Pending
from rlhf_suite.distributed.worker import Worker
from rlhf_suite.models.prompt_format import PromptFormat
from rlhf_suite.models.rehearsal import rehearse
from rlhf_suite.models.save import FolderParts, save_adapter
from rlhf_suite.train.checkpoint_files import Entries, file_digests, share
from rlhf_suite.train.export import export
from rlhf_suite.train.strategy import TrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainedWorker(Worker):
    """One rank of a model that is trained. Subclasses load `model` and `tokenizer`."""

    model: TrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptFormat | None = None  # that the model is trained on

    def save_state(self, folder: Path, with_optimizer: bool) -> Entries:
        """Write the part of this rank in a checkpoint, and return what the manifest says of its files."""
        return self.model.save_state(folder, with_optimizer=with_optimizer)

    def digest(self, folder: Path, names: Sequence[str]) -> dict[str, str]:
        """Return the SHA-256 of those of the files of a checkpoint that are this rank's share."""
        return file_digests(folder, share(names, self.rank.number, self.rank.mesh))

    def load_state(self, folder: Path, with_optimizer: bool) -> None:
        """Do the inverse of `save_state`."""
        self.model.load_state(folder, with_optimizer=with_optimizer)

    def rehearse_export(self) -> list[str]:
        """Try all of an export but the values of the weights. Return what had to be mended.

        Raises:
            UserError: the trained model could not be saved, or not be loaded again.
        """
        world, module = self.model.world, self.model.module
        if not world.is_main:
            return []
        return rehearse(FolderParts.of(module, self.tokenizer, self.prompts), whole=world.mesh.tensor == 1)

    def export(self, path: Path) -> list[str]:
        """Write the model in HF format: every rank gathers, and rank 0 writes. Return a sentence for each part that the
        folder lacks."""
        return export(self.model, self.tokenizer, path, prompts=self.prompts)

    def export_adapter(self, path: Path) -> list[str]:
        """Write the LoRA adapter alone, in the format of peft. Return as `export`."""
        model, is_main = self.model, self.model.world.is_main
        try:
            return save_adapter(
                model.module, self.tokenizer, path, gather=model.gather, is_main=is_main, prompts=self.prompts
            )
        finally:
            model.world.barrier()


class TrainedGroup(ModelGroup):
    """The ranks of a model that is trained."""

    def save_state(self, folder: Path, *, with_optimizer: bool) -> Entries:
        """Write the state of every rank into a folder of a checkpoint. Return what the manifest says of its files."""
        return self.submit_to_all("save_state", folder, with_optimizer, activity=f"saving {folder}").result()

    def digest(self, folder: Path, names: Sequence[str]) -> Pending[dict[str, str]]:
        """Start to compute the SHA-256 of files of a checkpoint, each by one rank; those that it cannot read are left
        out."""
        return self.submit_to_all("digest", folder, names, activity=f"reading {folder}")

    def submit_to_all(self, method: str, *args: Any, activity: str) -> Pending[dict[str, Any]]:
        """Call `method` of every rank with the same arguments; the answer has the entries of all answers."""
        refs = self.group.start(method, *args)
        return Pending(self.group, refs, f"{self.name}: {activity}", lambda answers: dict(ChainMap(*answers)))

    def load_state(self, folder: Path, *, with_optimizer: bool) -> None:
        """Do the inverse of `save_state`."""
        self.submit("load_state", folder, with_optimizer, activity=f"loading {folder}").result()

    def rehearse_export(self) -> list[str]:
        """Try all of an export but the values of the weights. Return what had to be mended."""
        said: list[str] = self.submit("rehearse_export", activity="rehearsing its export").result()
        return said

    def export(self, path: Path) -> list[str]:
        """Write the model in HF format. Return a sentence for each part that the folder lacks."""
        problems: list[str] = self.submit("export", path, activity="exporting").result()
        return problems

    def export_adapter(self, path: Path) -> list[str]:
        """Write the LoRA adapter alone, in the format of peft. Return as `export`."""
        problems: list[str] = self.submit("export_adapter", path, activity="exporting its adapter").result()
        return problems


class SupervisedGroup(TrainedGroup):
    """The ranks of a supervised run (`supervised.SupervisedWorker`)."""

    def steps(self) -> tuple[int, int]:
        """Return the optimiser steps of the run, and those of an epoch."""
        steps: tuple[int, int] = self.submit("steps", activity="counting its steps").result()
        return steps

    def train_step(self, step: int) -> dict[str, float]:
        """Take optimiser step `step` (0-based) and return its metrics."""
        metrics: dict[str, float] = self.submit("train_step", step, activity=f"step {step + 1}").result()
        return metrics

    def evaluate(self, step: int, shown: Callable[[Iterator[None], int], Iterator[None]]) -> dict[str, float]:
        """Return the metrics of the held-out sets after `step` optimiser steps. `shown` passes the parts on as they are
        done, and may show how many there are, of their number."""
        activity = f"the evaluation after step {step}"
        num_parts: int = self.submit("begin_evaluation", activity=activity).result()
        deque(
            shown(
                (self.submit("evaluate_part", part, activity=activity).result() for part in range(num_parts)), num_parts
            ),
            0,
        )
        metrics: dict[str, float] = self.submit("end_evaluation", activity=activity).result()
        return metrics
