"""The stages of a loop: each a run of another task in a folder and a process of its own, and done once.

What is done is what the stages' own `status.json` say; files that the loop itself makes of them are written whole. So a
loop that is killed anywhere goes on with the stage it was in. `loop.json` tells where it is:
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

from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resolve import fingerprint, save
from rlhf_suite.config.resume import changes, load_earlier, refusal
from rlhf_suite.config.runs import ResumableRun
from rlhf_suite.disk import write_json, write_text
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.processes import exclusive_lock, run_child
from rlhf_suite.tracking.run_folder import RunFolder

ORPHAN_S = 120.0  # for what a killed loop has left: an engine with a large model takes a while to go
OTHER = "choose another folder, or run it again as it was"


@dataclass
class Stages:
    """Runs stages in `folder`. Make one with `stages`."""

    folder: Path
    allowed: Collection[str]  # ckpt.allow_changes
    lock: int  # inherited by the stages, so that nobody else works in the folder before they are gone
    state: dict[str, Any] = field(default_factory=lambda: {"stages": {}})

    def run(self, name: str, run: ResumableRun) -> RunFolder:
        """Do the stage `name`, a run in `<folder>/<name>`, unless it is done.

        Raises:
            UserError: the folder holds a run of another configuration.
            RunError: the stage failed, in the words that it left.
        """
        stage = RunFolder(self.folder / name)
        begun = stage.status()["state"] != "new"
        if begun:
            check_same(run, stage, name, self.allowed)
        if stage.status()["state"] != "done":
            self.tell(stages=self.state["stages"] | {name: "running"})
            stage.path.mkdir(parents=True, exist_ok=True)
            ckpt = replace(run.ckpt, load_enable=begun, allow_changes=[*self.allowed])
            save(replace(run, ckpt=ckpt), stage.config)
            command = [sys.executable, "-m", "rlhf_suite.cli.stage", str(stage.path), str(os.getpid())]
            code = run_child(command, keep=[self.lock])
            if code or stage.status()["state"] != "done":
                raise failure(name, stage, code)
        shutil.rmtree(stage.checkpoints, ignore_errors=True)  # only a stage that goes on needs them
        self.tell(stages=self.state["stages"] | {name: "done"})
        return stage

    def write(self, name: str, rows: Iterable[dict[str, Any]]) -> Path:
        """Write rows, a function of what the stages left, as JSON lines to `<folder>/<name>`.

        Raises:
            UserError: other rows are there, from before a flag or the data was changed.
        """
        path, text = self.folder / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if not path.exists():
            write_text(path, text)
        elif path.read_text() != text:
            raise UserError(f"{path} was made with other flags, or of other data: {OTHER}")
        return path

    def tell(self, **values: Any) -> None:
        """Put values into loop.json."""
        self.state |= values
        write_json(RunFolder(self.folder).loop, self.state)


@contextmanager
def stages(folder: Path, allowed: Collection[str] = ()) -> Iterator[Stages]:
    """The stages in `folder`, for this process alone; `allowed`: flags that may differ from when they were begun."""
    with exclusive_lock(folder / "loop.lock", ORPHAN_S) as lock:
        yield Stages(folder.absolute(), allowed, lock)


def check_same(run: ResumableRun, stage: RunFolder, name: str, allowed: Collection[str]) -> None:
    """Refuse a stage that has begun as another run, apart from what may differ in a continuation."""
    if stage.status()["fingerprint"] == fingerprint(run):
        return
    before = load_earlier(stage.config)
    problem = before if isinstance(before, Problem) else refusal(changes(before, run), allowed, stage.config)
    if problem is not None:
        raise UserError(f"stage {name}: {problem.what}: {problem.fix}")


def failure(name: str, stage: RunFolder, code: int) -> Exception:
    """Why a stage ended early, and where to read more."""
    error = stage.status()["error"]
    if error is None:
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        error = f"it ended without a word ({ended}{', out of memory?' if code == -signal.SIGKILL else ''})"
    logs = [path for path in (stage.path / "error.log", stage.logs) if path.exists()]
    more = f"\nmore is in {' and '.join(map(str, logs))}" if logs else ""
    kind = UserError if code == 2 else RunError
    return kind(f"stage {name} failed: {error}{more}\nits folder is {stage.path}")
