"""The loop of a supervised run: which steps are trained, evaluated and saved, in one go and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_suite.config.runs import SFTRun
from rlhf_suite.train.journal import Journal
from rlhf_suite.train.metrics import read_rows
from rlhf_suite.train.run_folder import RunFolder
from rlhf_suite.train.saving import Saver
from rlhf_suite.train.trainer import Trainer

STEPS, PER_EPOCH = 7, 3


class Model:
    """In place of the ranks of a model: counts its steps; its loss falls by one a step."""

    name, world_size = "actor", 1

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.trained = 0

    def call(self, method: str, *args, what: str | None = None) -> list:
        return [getattr(self, method)(*args)]

    def train_step(self, step: int) -> dict[str, float]:
        self.steps.append(step)
        self.trained += 1
        return {"train/gpt_loss": 9.0 - self.trained}

    def evaluate(self) -> dict[str, float]:
        return {"eval/gpt_loss": 10.0 - self.trained}

    def save_state(self, folder: Path) -> None:
        (folder / "trained").write_text(str(self.trained))

    def load_state(self, folder: Path) -> None:
        self.trained = int((folder / "trained").read_text())

    def export(self, path: Path, *options: object) -> None:
        path.mkdir(parents=True, exist_ok=True)


@pytest.fixture
def fit(tmp_path):
    """Train to the end; gives the model and the rows of its metrics."""

    def run(every: int = -1, **ckpt):
        config = SFTRun()
        config.eval.dataset, config.eval.steps, config.logger.progress = "held out", every, False
        for name, value in ckpt.items():
            setattr(config.ckpt, name, value)
        folder, model = RunFolder(tmp_path), Model()
        folder.start("")
        journal = Journal(config.logger, folder, "sft")
        saver = Saver(config.ckpt, folder, {"actor": model}, "eval/gpt_loss")
        Trainer(config, model, saver, journal, STEPS, PER_EPOCH).fit()
        journal.close()
        return model, read_rows(folder.metrics)

    return run


def evaluations(rows) -> dict[int, float]:
    return {row["step"]: row["eval/gpt_loss"] for row in rows if "eval/gpt_loss" in row}


def test_every_step_is_trained_once_in_order(fit):
    model, rows = fit()
    assert model.steps == list(range(STEPS))
    trained = [row for row in rows if "train/gpt_loss" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["train/epoch"] for row in trained] == pytest.approx([step / 3 for step in range(1, 8)])


def test_without_an_interval_the_end_of_every_epoch_and_of_the_run_is_evaluated(fit):
    assert evaluations(fit()[1]) == {3: 7.0, 6: 4.0, 7: 3.0}


def test_an_interval_of_evaluations_ends_with_the_last_step(fit):
    assert evaluations(fit(every=2)[1]) == {2: 8.0, 4: 6.0, 6: 4.0, 7: 3.0}


def test_a_checkpoint_has_the_number_of_the_steps_that_are_in_it(fit, tmp_path):
    fit(save_steps=3, best_metric_key="none")
    saved = {path.name: int((path / "actor" / "trained").read_text()) for path in (tmp_path / "checkpoints").iterdir()}
    assert saved == {"step_000003": 3, "step_000006": 6}


def test_a_resumed_run_takes_the_step_behind_its_checkpoint(fit, tmp_path):
    import shutil

    _, rows = fit(save_steps=3, best_metric_key="none")
    shutil.rmtree(tmp_path / "checkpoints" / "step_000006")
    model, again = fit(save_steps=3, best_metric_key="none", load_enable=True)
    assert model.steps == [3, 4, 5, 6]
    for mine, theirs in zip(again, rows, strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith("tim")} == {
            k: v for k, v in theirs.items() if not k.startswith("tim")
        }
