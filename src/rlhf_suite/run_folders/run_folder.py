"""The folder of a run: the paths of its files, and `status.json`, the record of its state.

`status.json` is replaced as a whole, so a reader never sees half of it. It outlives a killed run: if its state is
"running" but the process does not exist, the run was killed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_suite.disk import DiskError, name_disk_errors, write_json
from rlhf_suite.errors import FixableError
from rlhf_suite.foreign_files import DamagedFile, read_table
from rlhf_suite.foreign_text import printable

SAMPLES_NAME = re.compile(r"step_([0-9]{1,12})\.parquet")
SHORT_LIMIT = 300  # the same on a full disk
ERROR_LIMIT = 20_000  # characters of the error in status.json
TIME = "%Y-%m-%dT%H:%M:%S%z"

# What status.json holds, and of which type each is.
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("state", "host", "started", "updated"), str),
    **dict.fromkeys(("fingerprint", "error", "run", "ended_early"), str | None),
    **{"last_step": int, "pid": int, "metrics": dict[str, float | None], "outputs": dict[str, str]},
    "resumes": list[dict[str, Any]],
}
NEW: dict[str, Any] = {"state": "new", "fingerprint": None, "last_step": 0, "error": None, "metrics": {}}


def samples_file(folder: Path, step: int) -> Path:
    """Return the path of the samples of a step in a folder of rollouts (from 1) or evaluations (after it)."""
    return folder / f"step_{step:06d}.parquet"


def list_samples_files(folder: Path) -> dict[int, Path]:
    """Return the files of samples in a folder by their steps, in ascending order. A file with another name, such as a
    copy that the user has made, is not one of them."""
    names = ((SAMPLES_NAME.fullmatch(path.name), path) for path in folder.glob("step_*.parquet"))
    return dict(sorted((int(name[1]), path) for name, path in names if name is not None))


@dataclass(frozen=True)
class RunFolder:
    """The paths and the status of one run. It holds only the path, so every process of the run may have one."""

    path: Path

    @property
    def config(self) -> Path:
        """Return the path of the resolved configuration."""
        return self.path / "config.yaml"

    @property
    def origins(self) -> Path:
        """Return the path of the record of who set each flag that has not its default."""
        return self.path / "origins.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def timeline(self) -> Path:
        """Return the path of the record of who was busy when."""
        return self.path / "timeline.jsonl"

    @property
    def waits(self) -> Path:
        """Return the path of the record of what the run waits for (`waits.py`); there is none after its end."""
        return self.path / "waits.json"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def benchmarks(self) -> Path:
        """Return the path of the results on benchmarks."""
        return self.path / "benchmarks.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def loop(self) -> Path:
        """Return the path of the state of a loop (`tasks/stages.py`)."""
        return self.path / "loop.json"

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def run_id(self) -> str:
        """Return the id of the run, which it keeps when it is continued; "" before its start."""
        return str(self.status().get("run") or "")

    @property
    def has_progress(self) -> bool:
        """Return whether a run here has done work that a new start would repeat."""
        if self.status()["state"] == "done" or self.status()["last_step"] > 0:
            return True
        kept = (self.loop, self.path / "progress.json", self.model)
        return any(path.exists() for path in kept) or any(self.checkpoints.glob("*"))

    def start(self, fingerprint: str) -> None:
        """Record that the run starts or continues. `fingerprint` identifies its configuration."""
        with name_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        process: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "started": _now()}
        run = self.run_id or uuid.uuid4().hex
        self._update(state="running", fingerprint=fingerprint, ended_early=None, error=None, run=run, **process)

    def set_run_id(self, run: str) -> None:
        """Record that the run continues from a checkpoint of the run `run`, and so has its id."""
        self._update(run=run)

    def record_model(self, name: str, path: Path) -> None:
        """Record the path of the model `name` of the run."""
        self._update(outputs=self.status().get("outputs", {}) | {name: str(path)})

    def record_resume(self, step: int, source: Path, changed: Mapping[str, list[Any]]) -> None:
        """Record that the run continues after `step` from the checkpoint `source`. `changed` has flags with old and new
        value."""
        entry = {"time": _now(), "step": step, "from": str(source), "changed": dict(changed)}
        self._update(resumes=[*self.status().get("resumes", []), entry])

    def record_step(self, step: int) -> None:
        """Record that optimiser step `step` (from 1) is done."""
        self._update(durable=False, last_step=step)

    def record_early_end(self, reason: str) -> None:
        """Record why the run ends before its last step."""
        self._update(ended_early=reason)

    def mark_done(self, metrics: Mapping[str, float]) -> None:
        """Record that the run is complete, with these metrics."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._update(state="done", metrics=finite)

    def mark_failed(self, error: BaseException | str) -> None:
        """Record that the run failed. A full disk may prevent this; then the error itself matters more."""
        said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        for limit in (ERROR_LIMIT, SHORT_LIMIT):
            with suppress(OSError, DiskError):
                self._update(state="failed", error=printable(said, limit, keep_lines=True))
                return

    def mark_stopped(self, reason: str) -> None:
        """Record that a signal stopped the run. It can continue from its last checkpoint."""
        self._update(state="stopped", error=reason)

    def mark_ended(self, reason: object) -> None:
        """Record that a process was ended before it could say how, unless it has said so."""
        if self.status()["state"] == "running":
            self.mark_stopped(str(reason))

    def status(self) -> dict[str, Any]:
        """Return the content of status.json: state, fingerprint, run (its id), host, pid, started, updated, last_step,
        error, ended_early (why it took fewer steps), metrics, outputs (the paths of its models)."""
        if not self.status_file.exists():
            return dict(NEW)
        try:
            return NEW | read_table(self.status_file, FIELDS)
        except DamagedFile as damage:
            fix = "delete it, since a run continues from its checkpoints without it"
            raise FixableError(str(damage), fix) from None

    def starts(self) -> list[float]:
        """Return when the run was started last and when it was continued, in seconds since the epoch and in order."""
        status, times = self.status(), []
        for text in (status.get("started"), *(entry.get("time") for entry in status.get("resumes", []))):
            with suppress(TypeError, ValueError, OverflowError):  # in a file that someone has edited
                times.append(datetime.strptime(text, TIME).timestamp())
        return sorted(times)

    def _update(self, durable: bool = True, **values: Any) -> None:
        """Change values of status.json."""
        status = self.status() | values | {"updated": _now()}
        try:
            write_json(self.status_file, status, durable)
        except DiskError:
            self._overwrite(status)

    def _overwrite(self, status: dict[str, Any]) -> None:
        """Write into the existing file. That works on a full disk, since the file's blocks are already allocated."""
        text = (json.dumps(status, indent=1) + "\n").encode()
        with name_disk_errors(self.status_file), self.status_file.open("r+b") as file:
            if len(text) > os.fstat(file.fileno()).st_blocks * 512:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.write(text)
            file.truncate()


def _now() -> str:
    return time.strftime(TIME)
