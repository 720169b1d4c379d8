"""Run the stages of a loop. Each is a run of another task, in its own folder and its own process, and is done once.

The `status.json` of a stage records whether it is done. Files that the loop makes from stages are written as a whole.
So a loop that was killed continues with the stage in which it was killed. `loop.json` shows the progress:
`{"iteration": 1, "iterations": 3, "stages": {"iter_0/generate": "done", ...}, "metrics": [{"eval/pass1": 0.4}, ...]}`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.disk import write_json, write_text
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.processes import exclusive_lock, run_child
from rlhf_suite.run_folders.record import fingerprint, save
from rlhf_suite.run_folders.resume import changes, load_earlier, refusal
from rlhf_suite.run_folders.run_folder import RunFolder

ORPHAN_S = 120.0  # for processes that a killed loop has left: an engine with a large model needs time to end
OTHER = "choose another folder, or run the loop again with the earlier flags"


@dataclass
class Stages:
    """Runs stages in `folder`. The function `stages` makes this object."""

    folder: Path
    allowed: Collection[str]  # ckpt.allow_changes
    lock: int  # inherited by the stages, so that no other process uses the folder before they have ended
    state: dict[str, Any] = field(default_factory=lambda: {"stages": {}})

    def run(self, name: str, run: Run) -> RunFolder:
        """Run the stage `name` in `<folder>/<name>` unless it is done. Return its run folder.

        Raises:
            UserError: the folder contains a run with another configuration.
            RunError: the stage failed; the message is that of the stage.
        """
        stage = RunFolder(self.folder / name)
        begun = stage.status()["state"] != "new"
        if begun:
            check_same(run, stage, name, self.allowed)
        if stage.status()["state"] != "done":
            self.record(stages=self.state["stages"] | {name: "running"})
            stage.path.mkdir(parents=True, exist_ok=True)
            ckpt = replace(run.ckpt, load_enable=begun, allow_changes=[*self.allowed])
            save(replace(run, ckpt=ckpt), stage.config)
            command = [sys.executable, "-m", "rlhf_suite.cli.execute", str(stage.path), str(os.getpid())]
            code = run_child(command, keep=[self.lock])
            if code or stage.status()["state"] != "done":
                raise failure(name, stage, code)
        shutil.rmtree(stage.checkpoints, ignore_errors=True)  # only an unfinished stage needs them
        self.record(stages=self.state["stages"] | {name: "done"})
        return stage

    def write(self, name: str, rows: Iterable[dict[str, Any]]) -> Path:
        """Write rows that were computed from finished stages to the file `<folder>/<name>`; return its path.

        Raises:
            UserError: the file exists with other rows, so a flag or the data has changed.
        """
        path, text = self.folder / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if not path.exists():
            write_text(path, text)
        elif path.read_text(encoding="utf-8") != text:
            raise UserError(f"{path} was made with other flags or from other data: {OTHER}")
        return path

    def record(self, **values: Any) -> None:
        """Update values in loop.json."""
        self.state |= values
        write_json(RunFolder(self.folder).loop, self.state)


@contextmanager
def stages(folder: Path, allowed: Collection[str] = ()) -> Iterator[Stages]:
    """Lock `folder` for this process and yield its stages. `allowed` are flags that may differ from earlier stages."""
    with exclusive_lock(folder / "loop.lock", ORPHAN_S) as lock:
        yield Stages(folder.absolute(), allowed, lock)


def check_same(run: Run, stage: RunFolder, name: str, allowed: Collection[str]) -> None:
    """Raise UserError if a stage was started with other flags than `run`, except for flags that may differ."""
    if stage.status()["fingerprint"] == fingerprint(run):
        return
    before = load_earlier(stage.config)
    problem = before if isinstance(before, Problem) else refusal(changes(before, run), run, allowed, stage.config)
    if problem is not None:
        raise UserError(f"stage {name}: {problem.what}: {problem.fix}")


def failure(name: str, stage: RunFolder, code: int) -> Exception:
    """Return the error for a stage that failed, with the paths of its logs."""
    error = stage.status()["error"]
    if error is None:
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        error = f"it ended without an error message ({ended}{', out of memory?' if code == -signal.SIGKILL else ''})"
    logs = [path for path in (stage.path / "error.log", stage.logs) if path.exists()]
    more = f"\nmore is in {' and '.join(map(str, logs))}" if logs else ""
    kind = UserError if code == 2 else RunError
    return kind(f"stage {name} failed: {error}{more}\nits folder is {stage.path}")
