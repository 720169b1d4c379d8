"""The folder of a run: where its files are, and `status.json`, the record of how it went.

`status.json` is replaced as a whole, so a reader never sees half of it, and it outlives a killed run: a run whose state
is "running" but whose process is gone was killed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.disk import DiskError, write_json, writing
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable

SHORT_LIMIT = 300  # ... on a full disk
ERROR_LIMIT = 20_000  # characters of the error in status.json

NEW: dict[str, Any] = {"state": "new", "fingerprint": None, "last_step": 0, "error": None, "metrics": {}}


@dataclass(frozen=True)
class RunFolder:
    """Paths and status of one run. Holds nothing but its path, so every process of the run may have one."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def loop(self) -> Path:
        """Where a loop is (`tasks/stages.py`)."""
        return self.path / "loop.json"

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def run_id(self) -> str:
        """What identifies the run, through all its continuations; empty before its start."""
        return str(self.status().get("run") or "")

    @property
    def has_progress(self) -> bool:
        """Whether a run here has done anything that starting it again would do again."""
        if self.status()["state"] == "done" or self.status()["last_step"] > 0:
            return True
        kept = (self.loop, self.path / "progress.json", self.model)
        return any(each.exists() for each in kept) or any(self.checkpoints.glob("*"))

    def start(self, fingerprint: str) -> None:
        """Record that the run begins, or goes on; `fingerprint` identifies its configuration."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        process: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "started": _now()}
        run = self.run_id or uuid.uuid4().hex
        self._update(state="running", fingerprint=fingerprint, error=None, run=run, **process)

    def set_run_id(self, run: str) -> None:
        """Record that the run goes on from a checkpoint of the run `run`, and so is that run."""
        self._update(run=run)

    def record_model(self, name: str, path: Path) -> None:
        """Record where the model `name` of the run is."""
        self._update(outputs=self.status().get("outputs", {}) | {name: str(path)})

    def record_resume(self, step: int, source: Path, changed: Mapping[str, list[Any]]) -> None:
        """Record that the run goes on after `step` from the checkpoint `source`; `changed`: flags, before and now."""
        entry = {"time": _now(), "step": step, "from": str(source), "changed": dict(changed)}
        self._update(resumes=[*self.status().get("resumes", []), entry])

    def record_step(self, step: int) -> None:
        """Record that optimiser step `step` (1-based) is done."""
        self._update(durable=False, last_step=step)

    def mark_done(self, metrics: Mapping[str, float]) -> None:
        """Record that the run reached its end with these metrics."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._update(state="done", metrics=finite)

    def mark_failed(self, error: BaseException | str) -> None:
        """Record that the run ended early, if the disk allows it at all: the error itself matters more."""
        said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        for limit in (ERROR_LIMIT, SHORT_LIMIT):
            with suppress(OSError, DiskError):
                self._update(state="failed", error=printable(said, limit, keep_lines=True))
                return

    def mark_stopped(self, reason: str) -> None:
        """A signal asked the run to end; it can go on from its last checkpoint."""
        self._update(state="stopped", error=reason)

    def status(self) -> dict[str, Any]:
        """Return what status.json says: state, fingerprint, run (its id), host, pid, started, updated, last_step,
        error, metrics, outputs (where its models are)."""
        if not self.status_file.exists():
            return dict(NEW)
        try:
            status: dict[str, Any] = json.loads(self.status_file.read_text())
            return NEW | status
        except (ValueError, TypeError):
            fix = "delete it, since a run continues from its checkpoints without it"
            raise UserError(f"{self.status_file} is damaged, it is not JSON: {fix}") from None

    def _update(self, durable: bool = True, **values: Any) -> None:
        status = self.status() | values | {"updated": _now()}
        try:
            write_json(self.status_file, status, durable)
        except DiskError:
            self._overwrite(status)

    def _overwrite(self, status: dict[str, Any]) -> None:
        """Write into the file that is there: a full disk still takes that, for the file's blocks are its own."""
        text = (json.dumps(status, indent=1) + "\n").encode()
        with writing(self.status_file), self.status_file.open("r+b") as file:
            if len(text) > os.fstat(file.fileno()).st_blocks * 512:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.write(text)
            file.truncate()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
