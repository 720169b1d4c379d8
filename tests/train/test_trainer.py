"""The loop of a supervised run: which steps are trained, evaluated and saved, in one go and after a resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rlhf_suite.api.why import describe_run
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.distributed.group import LocalGroup, Pending
from rlhf_suite.distributed.worker import Worker
from rlhf_suite.errors import RunError
from rlhf_suite.launch.stop import Stopped, stoppable
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.metrics import is_measured, read_rows
from rlhf_suite.train.callbacks import Callbacks
from rlhf_suite.train.checkpoint_files import Entries, digest_new_file, file_digests
from rlhf_suite.train.loop import Trainer
from rlhf_suite.train.saving import Saver, TrainingRows
from rlhf_suite.train.trained_worker import SupervisedGroup

STEPS, PER_EPOCH = 7, 3


Shown = Callable[[Iterator[None], int], Iterator[None]]


class Model:
    """In place of the ranks of a model: counts its steps; its loss falls by one a step."""

    improves_until = STEPS
    lacking: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.trained = 0

    def train_step(self, step: int) -> dict[str, float]:
        self.steps.append(step)
        self.trained += 1
        return {"train/gpt_loss": 9.0 - self.trained, "train/tokens": 10.0}

    def evaluate(self, step: int, shown: Shown) -> dict[str, float]:
        assert list(shown(iter([None] * 2), 2)) == [None] * 2
        return {"eval/gpt_loss": 10.0 - min(self.trained, self.improves_until)}

    def save_state(self, folder: Path, with_optimizer: bool) -> Entries:
        with digest_new_file(folder / "trained") as file:
            file.write(str(self.trained).encode())
        return {"trained": file.entry}

    def digest(self, folder: Path, names: Sequence[str]) -> Pending[dict[str, str]]:
        return Pending(self, [file_digests(folder, names)], "reading a checkpoint", lambda answers: answers[0])

    def wait(self, refs: Sequence[dict[str, str]], what: str) -> list[dict[str, str]]:
        return [*refs]

    def load_state(self, folder: Path, with_optimizer: bool) -> None:
        self.trained = int((folder / "trained").read_text())

    def rehearse_export(self) -> list[str]:
        assert not self.steps, "an export is tried before the first step"
        return ["something was mended"]

    def export(self, path: Path, *options: object) -> list[str]:
        path.mkdir(parents=True, exist_ok=True)
        (path / "trained").write_text(str(self.trained))
        return [*self.lacking]


@pytest.fixture
def fit(tmp_path):
    """Train to the end; gives the model and the rows of its metrics."""

    def run(every: int = -1, on_start: bool = True, patience: int | None = None, improves_until: int = STEPS,
            callbacks: Sequence[str] = (), keeps_callbacks: bool = True, **ckpt):  # fmt: skip
        config = Run.of("sft")
        config.eval.on_start, config.train.early_stopping_patience = on_start, patience
        config.eval.dataset, config.eval.steps, config.logger.progress = "held out", every, False
        for name, value in ckpt.items():
            setattr(config.ckpt, name, value)
        folder, model = RunFolder(tmp_path), Model()
        model.improves_until = improves_until
        folder.start("")
        journal = Journal(config.logger, folder, "sft")
        rows, made = TrainingRows("data.dataset", "all"), Callbacks(callbacks)
        saver = Saver(
            config.ckpt, folder, {"actor": model}, "eval/gpt_loss", rows, {"callbacks": made} if keeps_callbacks else {}
        )
        Trainer(
            train=config.train,
            evaluation=config.eval,
            saver=saver,
            journal=journal,
            total_steps=STEPS,
            callbacks=made,
            group=model,
            steps_per_epoch=PER_EPOCH,
        ).run()
        journal.close()
        return model, read_rows(folder.metrics)

    return run


def test_what_an_export_mends_is_said_before_the_first_step(fit, capsys):
    fit()
    assert "something was mended" in capsys.readouterr().err


def test_a_run_whose_export_lacks_a_part_keeps_its_weights_and_fails(fit, tmp_path, monkeypatch):
    monkeypatch.setattr(Model, "lacking", ("the tokenizer could not be written; copy it",))
    with pytest.raises(RunError, match=r"training is done, but .*/model has its weights, but the tokenizer"):
        fit()
    assert (tmp_path / "model" / "trained").read_text() == "7"
    assert read_rows(RunFolder(tmp_path).metrics)[-1]["step"] == STEPS


def evaluations(rows) -> dict[int, float]:
    return {row["step"]: row["eval/gpt_loss"] for row in rows if "eval/gpt_loss" in row}


@pytest.mark.notices(
    "a resume leaves a step out",
    "train/loop.py",
    "for step in range(start, self.total_steps):",
    "for step in range(start + 1, self.total_steps):",
)
@pytest.mark.notices(
    "the epoch is that before the step",
    "train/loop.py",
    "(step + 1) / self.steps_per_epoch",
    "step / self.steps_per_epoch",
)
def test_every_step_is_trained_once_in_order(fit):
    model, rows = fit()
    assert model.steps == list(range(STEPS))
    trained = [row for row in rows if "train/gpt_loss" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["train/epoch"] for row in trained] == pytest.approx([step / 3 for step in range(1, 8)])


@pytest.mark.notices(
    "the last step is not evaluated",
    "train/loop.py",
    "step in (self.total_steps, self.evaluated_beside_plan)",
    "step == self.evaluated_beside_plan",
)
@pytest.mark.notices(
    "without eval.steps only the end is evaluated",
    "train/loop.py",
    "else self.steps_per_epoch",
    "else self.total_steps",
)
def test_without_an_interval_the_end_of_every_epoch_and_of_the_run_is_evaluated(fit):
    assert evaluations(fit()[1]) == {0: 10.0, 3: 7.0, 6: 4.0, 7: 3.0}


def test_an_interval_of_evaluations_ends_with_the_last_step(fit):
    assert evaluations(fit(every=2)[1]) == {0: 10.0, 2: 8.0, 4: 6.0, 6: 4.0, 7: 3.0}


@pytest.mark.notices(
    "a checkpoint has the number of the step before",
    "train/loop.py",
    "self.save(step + 1, evaluation)",
    "self.save(step, evaluation)",
)
def test_a_checkpoint_has_the_number_of_the_steps_that_are_in_it(fit, tmp_path):
    fit(save_steps=3, best_metric_key="none")
    saved = {path.name: int((path / "actor" / "trained").read_text()) for path in (tmp_path / "checkpoints").iterdir()}
    assert saved == {"step_000003": 3, "step_000006": 6}


def test_a_resumed_run_takes_the_step_behind_its_checkpoint(fit, tmp_path):
    _, rows = fit(save_steps=3, best_metric_key="none")
    shutil.rmtree(tmp_path / "checkpoints" / "step_000006")
    model, again = fit(save_steps=3, best_metric_key="none", load_enable=True)
    assert model.steps == [3, 4, 5, 6]
    for mine, theirs in zip(again, rows, strict=True):
        assert {k: v for k, v in mine.items() if not is_measured(k)} == {
            k: v for k, v in theirs.items() if not is_measured(k)
        }


def test_the_evaluation_before_the_first_step_can_be_switched_off(fit):
    assert 0 not in evaluations(fit(on_start=False)[1])


def test_a_run_stops_after_as_many_evaluations_without_improvement_as_asked_for(fit, capsys):
    model, rows = fit(every=1, patience=2, improves_until=3)
    assert model.steps == [0, 1, 2, 3, 4], "the best is that of step 3, and those of steps 4 and 5 are no better"
    assert max(evaluations(rows)) == 5
    said = " ".join(capsys.readouterr().err.split())
    assert "Stopped early after step 5: eval/gpt_loss has not improved for 2 evaluations, its best value is 7" in said


def test_an_improvement_begins_the_count_anew(fit):
    assert fit(every=1, patience=1)[0].steps == list(range(STEPS))


def test_early_stopping_goes_on_counting_after_a_resume(fit, tmp_path):
    fit(every=1, patience=2, improves_until=3, save_steps=1)
    shutil.rmtree(tmp_path / "checkpoints" / "step_000005")
    model, _ = fit(every=1, patience=2, improves_until=3, save_steps=1, load_enable=True)
    assert model.steps == [4]
    model, _ = fit(every=1, patience=2, improves_until=3, save_steps=1, load_enable=True)
    assert model.steps == [], "the run had stopped"


def test_the_best_model_is_beside_the_last_one(fit, tmp_path):
    fit(every=1, improves_until=3, best_metric_key="eval/gpt_loss")
    assert (tmp_path / "model_best" / "trained").read_text() == "3"
    assert (tmp_path / "model" / "trained").read_text() == "7"


def test_there_is_no_best_model_unless_a_metric_is_named(fit, tmp_path):
    fit(every=1, save_steps=3)
    assert not (tmp_path / "model_best").exists()


OWN = """
import json, os, signal
import rlhf_suite as rs

class Own:
    def note(self, *call):
        with open({calls!r}, "a") as file:
            file.write(json.dumps(call) + "\\n")
    def on_step(self, step, metrics, samples):
        {at_step}
    def on_evaluation(self, step, metrics):
        self.note("evaluation", step)
        return rs.Save() if step == 2 else None
    def on_checkpoint(self, folder):
        self.note("checkpoint", folder.name)
    def on_end(self, status):
        self.note("end", status)
"""


@pytest.fixture
def own(tmp_path):
    """A callback of the user's that notes its calls, and does `at_step` after each step; and what it has noted."""
    calls = tmp_path / "calls.jsonl"

    def write(at_step: str) -> str:
        (tmp_path / "own.py").write_text(OWN.format(calls=str(calls), at_step=at_step))
        return f"{tmp_path / 'own.py'}:Own"

    return write, lambda: [json.loads(line) for line in calls.read_text().splitlines()]


@pytest.mark.notices(
    "what a callback asks for after an evaluation is forgotten",
    "train/loop.py",
    "self.callbacks.take(Save) is not None and self.saver.saved != step",
    "False",
)
@pytest.mark.notices(
    "the step with which a callback ends the run is not evaluated",
    "train/loop.py",
    "is_asked or self.callbacks.wants(Stop)",
    "is_asked",
)
def test_a_callback_saves_behind_an_evaluation_and_ends_the_run_with_an_evaluated_step(fit, own, tmp_path):
    write, calls = own
    name = write("return rs.Evaluate() if step == 2 else rs.Stop('enough') if step == 4 else None")
    model, _ = fit(every=100, on_start=False, best_metric_key="none", callbacks=[name])
    assert model.steps == [0, 1, 2, 3]
    assert calls() == [["evaluation", 2], ["checkpoint", "step_000002"], ["evaluation", 4], ["end", "done"]]
    folder = RunFolder(tmp_path)
    assert folder.status()["ended_early"] == "A callback ended the run after step 4: enough"
    folder.mark_done({})
    assert "  A callback ended the run after step 4: enough" in describe_run(folder)[1]
    folder.start("")
    assert folder.status()["ended_early"] is None


@pytest.mark.notices(
    "callbacks do not hear of the checkpoint of a signal", "train/saving.py", "        self.on_checkpoint(path)\n", ""
)
def test_callbacks_hear_of_every_checkpoint_also_of_that_of_a_signal(fit, own):
    write, calls = own
    name = write("if step == 3: os.kill(os.getpid(), signal.SIGTERM)")
    with stoppable(), pytest.raises(Stopped):
        fit(every=100, on_start=False, best_metric_key="none", save_steps=2, callbacks=[name])
    assert calls() == [["checkpoint", "step_000002"], ["checkpoint", "step_000003"], ["end", "stopped"]]


@pytest.mark.notices(
    "a checkpoint from before there were callbacks cannot be continued",
    "train/saving.py",
    "if name in state:",
    "if True:",
)
def test_a_checkpoint_from_before_there_were_callbacks_can_be_continued(fit, tmp_path):
    fit(save_steps=3, best_metric_key="none", keeps_callbacks=False)
    shutil.rmtree(tmp_path / "checkpoints" / "step_000006")
    model, _ = fit(save_steps=3, best_metric_key="none", load_enable=True)
    assert model.steps == [3, 4, 5, 6]


class Evaluating(Worker):
    """A rank whose evaluation has three parts."""

    def begin_evaluation(self) -> int:
        self.measured: list[int] = []
        return 3

    def evaluate_part(self, part: int) -> None:
        self.measured.append(part)

    def end_evaluation(self) -> dict[str, float]:
        return {f"eval/{place}": float(part) for place, part in enumerate(self.measured)}


def test_an_evaluation_is_shown_part_by_part_and_measures_each_once():
    group, seen = SupervisedGroup(LocalGroup(Evaluating, "actor", "cpu", ())), []

    def shown(parts, total):
        for part in parts:
            seen.append(total)
            yield part

    assert group.evaluate(1, shown) == group.evaluate(2, shown) == {"eval/0": 0.0, "eval/1": 1.0, "eval/2": 2.0}
    assert seen == [3] * 6
