"""Checkpoints of a whole run, resume, and the final models; what the supervised trainer and RL share."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlhf_suite.config.declarations.ckpt import NO_METRIC, CheckpointConfig
from rlhf_suite.config.declarations.flags import NAMED
from rlhf_suite.config.declarations.metrics import LOWER, direction_of
from rlhf_suite.disk import name_disk_errors
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.stop import Stopped, get_stop_signal
from rlhf_suite.run_folders.record import load
from rlhf_suite.run_folders.resume import Change, changes, list_allowed_changes, refusal
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.console import show_line
from rlhf_suite.train.checkpoint import Checkpoint, optimizer_problem, store_of
from rlhf_suite.train.checkpoint_files import Entries, file_digests
from rlhf_suite.train.output import deliver, final_folder
from rlhf_suite.train.trained_worker import TrainedGroup

Metrics = Callable[[], Mapping[str, float]]  # those of the step that is saved, once all that it started is over


class Stateful(Protocol):
    """Driver state beyond the step number, as plain JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Filed(Protocol):
    """Driver state too large for JSON: it writes files of its own into a folder of the checkpoint."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class TrainingRows(NamedTuple):
    """The flag that names the rows a run trains on, and a digest of the files they come from."""

    flag: str
    contents_digest: str


class Saver:
    """Saves every trained model with its optimiser and random states, and the state of the driver.

    The data cursor, shuffles and sampling seeds are functions of the step, so the step number stands for them.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a run saves is all that it is made of
        self,
        config: CheckpointConfig,
        folder: RunFolder,
        groups: Mapping[str, TrainedGroup],
        default_metric: str,
        rows: TrainingRows,
        driver_state: Mapping[str, Stateful] | None = None,
        driver_files: Mapping[str, Filed] | None = None,
    ) -> None:
        self.config, self.folder, self.groups, self.rows = config, folder, groups, rows
        self.driver_state, self.driver_files = driver_state or {}, driver_files or {}
        self.metric = config.best_metric_key or default_metric
        self.store = store_of(config, folder)
        self.best: float | None = None
        self.evaluations_since_best = 0
        self.saved = 0  # the last step of which there is a checkpoint
        self.on_checkpoint: Callable[[Path], object] = lambda path: None  # is told of every checkpoint
        self.lacking = list[str]()  # a sentence for each part of a model that could not be written

    def resume(self, say: Callable[[str], None]) -> int:
        """Load the newest sound checkpoint if ckpt.load_enable asks for it, and return the step to continue with."""
        self.store.sweep()
        checkpoints = self.store.list_all()
        if checkpoints and not self.config.load_enable:
            raise UserError(
                f"ckpt.path={self.store.path} holds checkpoints of an earlier run (step {checkpoints[0].step}). "
                "Set ckpt.load_enable=true to continue from there, or choose another ckpt.path"
            )
        checkpoint = self.store.newest_sound(say, self.digests)
        if checkpoint is None:
            return 0
        state, changed = checkpoint.state(), self.changes_since(checkpoint)
        self.check_same_rows(checkpoint, state)
        said = "".join(f"; {change}" for change in changed)
        say(f"Resuming after step {checkpoint.step} from {checkpoint.path}{said}")
        for name, group in self.groups.items():
            group.load_state(checkpoint.path / name, with_optimizer=not self.config.reset_optimizer)
        self.folder.set_run_id(state["run"])
        self.best, self.evaluations_since_best = state["best"], state["evaluations_since_best"]
        for name, part in self.driver_state.items():
            if name in state:  # what the suite did not have yet when the checkpoint was written begins from its start
                part.load_state_dict(state[name])
        for name, files in self.driver_files.items():
            files.load(checkpoint.path / name)
        self.saved = checkpoint.step
        self.folder.record_resume(
            checkpoint.step, checkpoint.path, {change.key: [change.before, change.now] for change in changed}
        )
        return checkpoint.step

    def check_same_rows(self, checkpoint: Checkpoint, state: Mapping[str, object]) -> None:
        """Raise UserError if the run would train on other rows than those of the checkpoint, unless it may."""
        allowed = {self.rows.flag, "data"} & {*self.config.allow_changes}
        if state["rows"] != self.rows.contents_digest and not allowed:
            raise UserError(
                f"{self.rows.flag}: the files have other contents than when {checkpoint.path} was written. Restore "
                f"them, or add 'ckpt.allow_changes=[{self.rows.flag}]' to continue with the new rows"
            )

    def changes_since(self, checkpoint: Checkpoint) -> list[Change]:
        """Return the flags that are not what they were for this checkpoint; UserError where they may not be.

        The command line was compared with the newest checkpoint; an older one may be of other flags again.
        """
        if problem := optimizer_problem(checkpoint, self.config):
            raise UserError(f"{problem.what}: {problem.fix}")
        changed_flags = [Change("ckpt.reset_optimizer", False, True, NAMED)] if self.config.reset_optimizer else []
        if not (self.folder.config.exists() and checkpoint.config.exists()):  # not started by the command line
            return changed_flags
        now, before = load(self.folder.config), load(checkpoint.config)
        changed = changes(before, now)
        if problem := refusal(changed, now, list_allowed_changes(now), checkpoint.config):
            raise UserError(f"{problem.what}: {problem.fix}")
        return [*changed, *changed_flags]

    def save_if_due(self, step: int, evaluation: Mapping[str, float], metrics: Metrics = dict) -> None:
        """The periodic checkpoint, and the best one when this step's evaluation beats all before; the model of that
        step too where ckpt.best_metric_key names a metric. `metrics` are written into metric.json."""
        if self.is_best(evaluation):
            self.save(step, "best", metrics)
            if self.config.best_metric_key is not None:
                self.export(kind="best")
        if self.config.save_steps > 0 and step % self.config.save_steps == 0:
            self.save(step, "step", metrics)

    def stop_if_requested(self, step: int, metrics: Metrics = dict) -> None:
        """End the run after `step` when a signal asked for it; the step is saved first, whatever ckpt.save_steps is."""
        number = get_stop_signal()
        if number is None:
            return
        if self.saved != step:
            self.save(step, "step", metrics)
        raise Stopped(number, f"step {step}")

    def is_best(self, evaluation: Mapping[str, float]) -> bool:
        """Return whether the metric of ckpt.best_metric_key is the best so far, in its direction, and is kept."""
        if self.metric not in evaluation:
            # The rules know the metrics of a task, and only an evaluation has the names of its sets.
            if evaluation and self.config.best_metric_key not in (None, NO_METRIC):
                choices = ", ".join(sorted(evaluation))
                raise UserError(f"ckpt.best_metric_key={self.metric}: the evaluation has {choices}, or set {NO_METRIC}")
            return False
        value, direction = evaluation[self.metric], direction_of(self.metric)
        assert direction is not None, f"{self.metric}: checked with the flags"
        is_worse = self.best is not None and (value >= self.best if direction == LOWER else value <= self.best)
        if is_worse or not math.isfinite(value):
            self.evaluations_since_best += 1
            return False
        self.best, self.evaluations_since_best = value, 0
        return self.config.keeps_best

    def save(self, step: int, kind: str, metrics: Metrics = dict) -> None:
        """Write a checkpoint into a folder of its own, then commit it."""
        row = metrics()
        with name_disk_errors(self.store.path):
            folder = self.store.begin(step, kind)
        try:
            with name_disk_errors(folder):
                path = self._write(folder, step, kind, row)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # a full disk has room again for saying so
            raise
        self.on_checkpoint(path)

    def digests(self, folder: Path, names: Sequence[str]) -> dict[str, str]:
        """Return the SHA-256 of files of a checkpoint. The ranks of a model read its folder, those of the actor what
        else is large, and this process what it writes itself; all at the same time."""
        of_groups, own = defaultdict[str, list[str]](list), list[str]()
        for name in names:
            top, _, rest = name.partition("/")
            files = own if not rest or top in self.driver_files else of_groups[top if top in self.groups else "actor"]
            files.append(name)
        started = [self.groups[name].digest(folder, files) for name, files in of_groups.items()]
        read = file_digests(folder, own)
        for pending in started:
            read |= pending.result()  # no-limit: a group has one
        return read

    def _write(self, folder: Path, step: int, kind: str, metrics: Mapping[str, float]) -> Path:
        written = Entries()
        for name, group in self.groups.items():
            (folder / name).mkdir()
            entries = group.save_state(folder / name, with_optimizer=not self.config.disable_ds)
            written |= {f"{name}/{file}": entry for file, entry in entries.items()}
        for name, files in self.driver_files.items():
            (folder / name).mkdir()
            files.save(folder / name)
        if self.config.save_hf:
            self.report(folder / "hf", self.groups["actor"].export(folder / "hf"))
        if self.folder.config.exists():
            shutil.copyfile(self.folder.config, folder / "config.yaml")
        is_lower = direction_of(self.metric) == LOWER
        best = {"metric": self.metric, "lower_is_better": is_lower, "best_so_far": self.best}
        (folder / "metric.json").write_text(
            json.dumps({"step": step, "metrics": {**metrics}, "best": best}, indent=1), encoding="utf-8"
        )
        state: dict[str, Any] = {
            "step": step,
            "best": self.best,
            "evaluations_since_best": self.evaluations_since_best,
            "run": self.folder.run_id,
            "rows": self.rows.contents_digest,
            "has_optimizer": not self.config.disable_ds,
        }
        state |= {name: part.state_dict() for name, part in self.driver_state.items()}
        path = self.store.commit(step, state, kind, written, self.digests)
        self.saved = step
        return path

    def stops_early(self, step: int, patience: int | None, say: Callable[[str], None]) -> bool:
        """Whether the last `patience` evaluations did not improve the metric, so that the run ends after `step`; says
        so. Never for None."""
        if patience is None or self.evaluations_since_best < patience:
            return False
        best = "no finite value" if self.best is None else f"its best value is {self.best:.6g}"
        say(f"Stopped early after step {step}: {self.metric} has not improved for {patience} evaluations, {best}")
        return True

    def export(self, name: str = "actor", kind: str = "") -> Path:
        """Write the final model in HF format. Others than the actor go beside it, with their name, and the best one
        with `kind`."""
        output = final_folder(self.config.output_dir, self.folder)
        suffix = kind or (name if name != "actor" else "")
        path = output.with_name(f"{output.name}_{suffix}") if suffix else output

        problems = list[str]()

        def write(place: Path) -> None:
            problems[:] = self.groups[name].export(place)
            if self.config.save_adapter:
                adapter = place.with_name(f"{place.name}_adapter")
                problems.extend(self.groups[name].export_adapter(adapter))

        place = deliver(write, path, self.folder, kind or name, keep=self.store.path)
        self.report(place, problems)
        return place

    def report(self, model: Path, problems: Sequence[str]) -> None:
        """Say which parts a model's folder lacks. Its weights are there, so the run goes on; its end will tell."""
        for problem in problems:
            self.lacking.append(f"{model} has its weights, but {problem}")
            show_line(self.lacking[-1], to_stderr=True)

    def check_models(self) -> None:
        """Raise RunError if a part of a model could not be written."""
        if self.lacking:
            raise RunError(f"The training is done, but {'. '.join(self.lacking)}")

    def rehearse(self, names: Collection[str]) -> list[str]:
        """Try the exports of these models before they are trained. Return what had to be mended.

        Raises:
            UserError: a trained model could not be saved, or not be loaded again.
        """
        return [said for name in names for said in self.groups[name].rehearse_export()]
