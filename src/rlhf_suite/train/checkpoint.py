"""The one commit protocol of checkpoints: write aside, list with digests, sync, rename. What is not listed is nothing.

Layout: `<path>/step_000120/` and `<path>/best_000100/`, each with `state.json`, `metric.json`, the run's
`config.yaml`, a folder per model, and `manifest.json`, which has the size and the SHA-256 of every other file. The
sizes are compared at every look, the digests before a checkpoint is loaded. The process that commits or looks for a
checkpoint reads no file of a model: the ranks that write and load these files say what their digests are.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.ckpt import CheckpointConfig
from rlhf_suite.disk import flush, resolve_home
from rlhf_suite.errors import RunError
from rlhf_suite.foreign_files import DamagedFile, read_json, read_table
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.train.checkpoint_files import Entry, file_digests

MANIFEST = "manifest.json"
KINDS = ("step", "best")
NAME = re.compile(rf"({'|'.join(KINDS)})_(\d{{6,}})")
# What computes the SHA-256 of files of a folder, by name; it leaves out those that cannot be read.
Digests = Callable[[Path, Sequence[str]], Mapping[str, str]]


class DamagedError(Exception):
    """A file of a checkpoint differs from what was written; the message names it."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was committed."""

    path: Path
    step: int
    kind: str = "step"

    def state(self) -> dict[str, Any]:
        """Return what `commit` was given: step, metric, controller states, cursors."""
        return read_table(self.path / "state.json", {"run": str, "step": int})

    @property
    def config(self) -> Path:
        """Return the path of the configuration of the run that wrote the checkpoint."""
        return self.path / "config.yaml"

    def check_sizes(self) -> dict[str, Entry]:
        """Return what the manifest says of each file.

        Raises:
            DamagedError: the manifest cannot be read, or a file is missing or has another size.
        """
        entries = read_manifest(self.path / MANIFEST, self.step)
        for name, entry in entries.items():
            file = self.path / name
            if not file.is_file():
                raise DamagedError(f"{name} is missing")
            if (size := file.stat().st_size) != entry.bytes:
                raise DamagedError(f"{name} has {size} bytes instead of {entry.bytes}")
        return entries

    def check_contents(self, digests: Digests = file_digests) -> None:
        """Compare every file with the manifest, to the last byte. Raises DamagedError."""
        entries = self.check_sizes()
        read = digests(self.path, [*entries])
        for name, entry in entries.items():
            if name not in read:
                raise DamagedError(f"{name} cannot be read")
            if read[name] != entry.sha256:
                raise DamagedError(f"{name} is not what was written (its SHA-256 differs)")

    def is_whole(self) -> bool:
        """Return whether every file is there with its size. This reads no contents."""
        try:
            self.check_sizes()
        except DamagedError:
            return False
        return True


class CheckpointStore:
    """Checkpoints of one run. One process calls `begin`, everyone writes into that folder, one calls `commit`."""

    def __init__(self, config: CheckpointConfig, path: Path) -> None:
        self.config, self.path = config, path

    def begin(self, step: int, kind: str = "step") -> Path:
        """Make a fresh folder to write into, which readers do not see, and return it."""
        folder = self.path / f"{kind}_{step:06d}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(
        self,
        step: int,
        state: dict[str, Any],
        kind: str = "step",
        written: Mapping[str, Entry] | None = None,
        digests: Digests = file_digests,
    ) -> Path:
        """Turn the folder of `begin` into a checkpoint, whole or not at all, then delete old ones; return its path.

        `written`: the files that are on the disk already, as said by who wrote them; `digests` reads all others.

        Raises:
            RunError: a file that one process has written is not there for another.
        """
        folder = self.path / f"{kind}_{step:06d}.tmp"
        (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        entries = entries_of(folder, written or {}, digests)
        (folder / MANIFEST).write_text(
            json.dumps({"step": step, "files": {name: entry._asdict() for name, entry in entries.items()}}, indent=1),
            encoding="utf-8",
        )
        for path in [*folder.rglob("*"), folder]:
            if str(path.relative_to(folder)) not in (written or {}):
                flush(path)
        final = folder.with_suffix("")
        if final.exists():
            remove(final)
        folder.rename(final)
        flush(self.path)
        self._rotate(keep=final)
        return final

    def list_all(self) -> list[Checkpoint]:
        """Return every checkpoint, damaged or not, newest first; both kinds hold the whole state."""
        names = [(folder, NAME.fullmatch(folder.name)) for folder in self.path.glob("*_*")]
        checkpoints = [Checkpoint(folder, int(name[2]), name[1]) for folder, name in names if name and folder.is_dir()]
        return sorted(checkpoints, key=lambda ckpt: (ckpt.step, ckpt.kind), reverse=True)

    def all(self, kind: str = "step") -> list[Checkpoint]:
        """Return the checkpoints of a kind whose files are all there, oldest first."""
        return [ckpt for ckpt in reversed(self.list_all()) if ckpt.kind == kind and ckpt.is_whole()]

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint whose files are all there, periodic or best."""
        return next((ckpt for ckpt in self.list_all() if ckpt.is_whole()), None)

    def newest_sound(self, say: Callable[[str], None], digests: Digests = file_digests) -> Checkpoint | None:
        """Return the newest checkpoint whose files are as they were written, by their `digests`; None where there is
        none at all.

        Raises:
            RunError: there are checkpoints, but each of them is damaged.
        """
        damages = []
        for checkpoint in self.list_all():
            try:
                checkpoint.check_contents(digests)
            except DamagedError as damage:
                damages.append(f"{checkpoint.path.name} is damaged: {damage}")
                say(f"Skipping a checkpoint: {checkpoint.path} is damaged: {damage}")
                continue
            return checkpoint
        if damages:
            raise RunError(
                f"no checkpoint in {self.path} can be loaded ({'; '.join(damages)}). Restore one of them from a copy, "
                "or start again from step 0 in another folder"
            )
        return None

    def sweep(self) -> None:
        """Remove what a killed run had begun to write or to delete."""
        for orphan in self.path.glob("*.tmp"):
            if NAME.match(orphan.name):  # ckpt.path may be a folder that others use too
                shutil.rmtree(orphan, ignore_errors=True)

    def _rotate(self, keep: Path) -> None:
        """Delete the oldest periodic ones beyond `ckpt.max_num` or `ckpt.max_mem`, and all but the newest best."""
        for stale in self.all("best")[:-1]:
            remove(stale.path)
        self.sweep()
        regular = self.all("step")
        limit = float("inf") if self.config.max_mem is None else self.config.max_mem * 2**30
        while len(regular) > self.config.max_num or (folder_bytes(self.path) > limit and len(regular) > 1):
            stale = regular.pop(0)
            if stale.path == keep:
                break
            remove(stale.path)


def optimizer_problem(checkpoint: Checkpoint, config: CheckpointConfig) -> Problem | None:
    """Return why a run cannot go on from a checkpoint: it has no optimiser state, and the run asks for one."""
    if checkpoint.state().get("has_optimizer", True) or config.reset_optimizer:
        return None
    problem = f"{checkpoint.path} has only weights (it was saved with ckpt.disable_ds=true)"
    fix = "add ckpt.reset_optimizer=true to continue from them with new optimiser moments"
    return Problem("ckpt.load_enable", problem, fix)


def store_of(config: CheckpointConfig, folder: RunFolder) -> CheckpointStore:
    """Return the checkpoints of a run in a folder: at ckpt.path, or below the folder."""
    path = resolve_home(config.path) if config.path else folder.checkpoints
    return CheckpointStore(config, path.resolve())


def read_manifest(path: Path, step: int) -> dict[str, Entry]:
    """Return what the manifest of the checkpoint of `step` says of each file. Raises DamagedError."""
    if not path.exists():
        raise DamagedError(f"{path.name} is missing")
    try:
        manifest = read_json(path)
        entries = {
            str(name): Entry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()
        }
        is_right = manifest["step"] == step and "state.json" in entries
    except (DamagedFile, ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{path.name} cannot be read") from None
    if not is_right:
        raise DamagedError(f"{path.name} is not that of step {step}")
    return entries


def entries_of(folder: Path, written: Mapping[str, Entry], digests: Digests) -> dict[str, Entry]:
    """Return what a manifest says of every file of a folder: as `written` says, or by their `digests`.

    Raises:
        RunError: a file that one process has written is not there for another.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    others = [name for name in sizes if name not in written]
    read = digests(folder, others)
    unseen = [name for name, entry in written.items() if sizes.get(name) != entry.bytes]
    if unseen := sorted([*unseen, *({*others} - read.keys())]):
        raise RunError(
            f"{folder / unseen[0]} was written by one process of the run, and another one does not see it. Put "
            "checkpoints on a file system that all nodes share: ckpt.path=<folder>"
        )
    return {name: written.get(name) or Entry(size, read[name]) for name, size in sizes.items()}


def remove(folder: Path) -> None:
    """Delete a checkpoint so that a kill in between leaves nothing that looks like a damaged one."""
    aside = folder.with_name(f"{folder.name}.old.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
