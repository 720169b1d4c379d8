"""The one commit protocol of checkpoints: write aside, fsync, manifest, rename. A folder without a manifest is nothing.

Layout: `<path>/step_000120/` and `<path>/best_000100/`, each with `state.json`, `manifest.json` and a folder per model.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.config.ckpt import CheckpointConfig
from rlhf_suite.disk import flush

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """What `commit` was given: step, metric, controller states, cursors."""
        return json.loads((self.path / "state.json").read_text())


class CheckpointStore:
    """Checkpoints of one run. One process calls `begin`, everyone writes into that folder, one calls `commit`."""

    def __init__(self, config: CheckpointConfig, path: Path) -> None:
        self.config, self.path = config, path

    def begin(self, step: int, kind: str = "step") -> Path:
        """A fresh folder to write into, invisible to readers."""
        folder = self.path / f"{kind}_{step:06d}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(self, step: int, state: dict[str, Any], kind: str = "step") -> Path:
        """Make the folder of `begin` a checkpoint, whole or not at all; then rotate."""
        folder = self.path / f"{kind}_{step:06d}.tmp"
        (folder / "state.json").write_text(json.dumps(state, indent=1))
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
        (folder / MANIFEST).write_text(json.dumps({"step": step, "files": sizes}, indent=1))
        for written in [*folder.rglob("*"), folder]:
            flush(written)
        final = folder.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
        flush(self.path)
        self._rotate(keep=final)
        return final

    def all(self, kind: str = "step") -> list[Checkpoint]:
        """Committed and complete checkpoints, oldest first."""
        folders = self.path.glob(f"{kind}_" + "[0-9]" * 6)
        found = [Checkpoint(folder, int(folder.name.split("_")[1])) for folder in folders]
        return sorted((ckpt for ckpt in found if is_complete(ckpt.path)), key=lambda ckpt: ckpt.step)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, periodic or best: both hold the whole state."""
        found = self.all("step") + self.all("best")
        return max(found, key=lambda ckpt: ckpt.step, default=None)

    def sweep(self) -> None:
        """Remove what a killed run had begun to write."""
        for orphan in self.path.glob("*.tmp"):
            shutil.rmtree(orphan, ignore_errors=True)

    def _rotate(self, keep: Path) -> None:
        """Delete the oldest periodic ones beyond `ckpt.max_num` or `ckpt.max_mem`, and all but the newest best."""
        for stale in self.all("best")[:-1]:
            shutil.rmtree(stale.path)
        self.sweep()
        regular = self.all("step")
        limit = float("inf") if self.config.max_mem is None else self.config.max_mem * 2**30
        while len(regular) > self.config.max_num or (folder_bytes(self.path) > limit and len(regular) > 1):
            stale = regular.pop(0)
            if stale.path == keep:
                break
            shutil.rmtree(stale.path)


def is_complete(folder: Path) -> bool:
    """Whether every file of the manifest is there with its size."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return False
    files = json.loads(manifest.read_text())["files"]
    return all((folder / name).exists() and (folder / name).stat().st_size == size for name, size in files.items())


def folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
