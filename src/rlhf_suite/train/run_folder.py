"""The folder of a run: where its files are, and `status.json`, the record of how it went.

`status.json` is replaced as a whole, so a reader never sees half of it, and it outlives a killed run: a run whose state
is "running" but whose process is gone was killed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.foreign_text import printable

ERROR_LIMIT = 20_000  # characters of the error in status.json


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

    def start(self, fingerprint: str) -> None:
        """The run begins, or goes on; `fingerprint` identifies its configuration."""
        self.path.mkdir(parents=True, exist_ok=True)
        process = {"host": socket.gethostname(), "pid": os.getpid(), "started": _now()}
        self._update(state="running", fingerprint=fingerprint, error=None, **process)

    def step(self, step: int) -> None:
        """Optimiser step `step` (1-based) is done."""
        self._update(last_step=step)

    def done(self, metrics: Mapping[str, float]) -> None:
        """The run reached its end with these metrics."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._update(state="done", metrics=finite)

    def failed(self, error: BaseException | str) -> None:
        """The run ended early."""
        said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._update(state="failed", error=printable(said, ERROR_LIMIT, keep_lines=True))

    def stopped(self, reason: str) -> None:
        """A signal asked the run to end; it can go on from its last checkpoint."""
        self._update(state="stopped", error=reason)

    def status(self) -> dict[str, Any]:
        """What status.json says: state, fingerprint, host, pid, started, updated, last_step, error, metrics."""
        if not self.status_file.exists():
            return {"state": "new", "fingerprint": None, "last_step": 0, "error": None, "metrics": {}}
        return json.loads(self.status_file.read_text())

    def _update(self, **values: Any) -> None:
        aside = self.status_file.with_suffix(".tmp")
        aside.write_text(json.dumps(self.status() | values | {"updated": _now()}, indent=2) + "\n")
        aside.replace(self.status_file)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
