"""When a run saves what, and that it goes on from there."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from full_disk import fill, make_read_only
from rlhf_suite.config.declarations.ckpt import CheckpointConfig
from rlhf_suite.disk import DiskError
from rlhf_suite.distributed.group import LocalGroup
from rlhf_suite.errors import UserError
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.train.checkpoint_files import Entries, digest_new_file
from rlhf_suite.train.parts import write_tensors
from rlhf_suite.train.saving import Saver, TrainingRows
from rlhf_suite.train.trained_worker import TrainedGroup, TrainedWorker


class Counter(TrainedWorker):
    """A model of one number."""

    number = 0
    lacking: tuple[str, ...] = ()  # parts of an export that cannot be written
    asked: tuple[bool, ...] = ()  # whether the optimiser's state was saved or loaded, call by call

    def get_asked(self) -> list[bool]:
        return list(self.asked)

    def set(self, number: int) -> None:
        self.number = number

    def get(self) -> int:
        return self.number

    def save_state(self, folder: Path, with_optimizer: bool) -> Entries:
        self.asked = (*self.asked, with_optimizer)
        with digest_new_file(folder / "number") as file:
            file.write(str(self.number).encode())
        return {"number": file.entry}

    def load_state(self, folder: Path, with_optimizer: bool) -> None:
        self.asked = (*self.asked, with_optimizer)
        self.number = int((folder / "number").read_text())

    def export(self, path: Path) -> list[str]:
        path.mkdir(parents=True)
        (path / "number").write_text(str(self.number))
        return [*self.lacking]


class Beta:
    """Driver state."""

    value = 1.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Notes:
    """Driver state in a file of its own."""

    text = ""

    def save(self, folder: Path) -> None:
        (folder / "text").write_text(self.text)

    def load(self, folder: Path) -> None:
        self.text = (folder / "text").read_text()


@pytest.fixture
def group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # the worker sets them; they are put back after the test
    return TrainedGroup(LocalGroup(Counter, "actor", "cpu", ()))


@pytest.fixture
def saver(tmp_path, group):
    def make(identity="abc", **config) -> Saver:
        folder, driver_state = RunFolder(tmp_path / "run"), {"beta": Beta()}
        parts = (driver_state, {"notes": Notes()})
        rows = TrainingRows("data.dataset", identity)
        return Saver(CheckpointConfig.of("sft", **config), folder, {"actor": group}, "eval/gpt_loss", rows, *parts)

    return make


def names(saver: Saver) -> list[str]:
    return sorted(folder.name for folder in saver.store.path.glob("*"))


@pytest.mark.notices(
    "checkpoints are made one step early",
    "train/saving.py",
    "step % self.config.save_steps == 0",
    "(step + 1) % self.config.save_steps == 0",
)
@pytest.mark.notices(
    "the highest loss is the best",
    "train/saving.py",
    "value >= self.best if direction == LOWER else",
    "value >= self.best if direction != LOWER else",
)
def test_periodic_checkpoints_and_the_best(saver):
    one = saver(save_steps=2)
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, 2.0)):
        one.save_if_due(step, {"eval/gpt_loss": loss})
    assert names(one) == ["best_000002", "step_000002", "step_000004"]


def test_no_checkpoint_unless_asked_for(saver):
    one = saver()
    one.save_if_due(1, {"eval/gpt_loss": 3.0})
    assert names(one) == []
    named = saver(best_metric_key="eval/gpt_loss")
    named.save_if_due(1, {"eval/gpt_loss": 3.0})
    named.save_if_due(2, {})
    assert names(named) == ["best_000001"]
    assert saver(save_steps=1, best_metric_key="none").is_best({"eval/gpt_loss": 3.0}) is False


def test_losses_are_best_when_lowest_other_metrics_when_highest(saver):
    loss = saver(save_steps=1)
    assert [loss.is_best({"eval/gpt_loss": value}) for value in (2.0, 3.0, 1.0, 1.0)] == [True, False, True, False]
    for name in ("eval/acc", "eval/glossary/acc", "eval/lossless/pass4"):
        accuracy = saver(save_steps=1, best_metric_key=name)
        assert [accuracy.is_best({name: value}) for value in (0.2, 0.1, 0.3, 0.3)] == [True, False, True, False], name


def test_a_value_that_is_not_finite_is_never_the_best(saver):
    one = saver(save_steps=1)
    values = (math.nan, 3.0, math.nan, -math.inf, 2.0)
    assert [one.is_best({"eval/gpt_loss": value}) for value in values] == [False, True, False, False, True]


def test_an_unknown_metric_is_refused_with_the_known_ones(saver):
    with pytest.raises(UserError, match=r"ckpt\.best_metric_key=eval/los: the evaluation has eval/gpt_loss"):
        saver(best_metric_key="eval/los").save_if_due(1, {"eval/gpt_loss": 3.0})


@pytest.mark.notices(
    "a resumed run forgets its best evaluation",
    "train/saving.py",
    'self.best, self.evaluations_since_best = state["best"],',
    "self.best, self.evaluations_since_best = None,",
)
@pytest.mark.notices(
    "the KL coefficient begins anew after a resume", "train/saving.py", "part.load_state_dict(state[name])", "pass"
)
def test_a_resume_brings_back_models_driver_state_and_the_best_value(saver, group):
    first = saver(save_steps=1)
    first.driver_state["beta"].value = 0.25
    first.driver_files["notes"].text = "held"
    group.submit("set", 7, activity="").result()
    first.save_if_due(5, {"eval/gpt_loss": 2.0})
    group.submit("set", 8, activity="").result()
    second = saver(save_steps=1, load_enable=True)
    assert second.resume(print) == 5
    assert group.submit("get", activity="").result() == 7
    assert second.driver_state["beta"].value == 0.25
    assert second.driver_files["notes"].text == "held"
    assert second.is_best({"eval/gpt_loss": 2.5}) is False


def test_a_resume_says_from_where_and_passes_over_a_damaged_checkpoint(saver, group):
    first, said = saver(save_steps=1), []
    for step in (1, 2):
        group.submit("set", step, activity="").result()
        first.save_if_due(step, {})
    damaged = first.store.path / "step_000002" / "actor" / "number"
    damaged.write_text("3")  # of the right size
    assert saver(save_steps=1, load_enable=True).resume(said.append) == 1
    assert group.submit("get", activity="").result() == 1
    assert said == [
        f"Skipping a checkpoint: {damaged.parents[1]} is damaged: actor/number is not what was written (its SHA-256 "
        "differs)",
        f"Resuming after step 1 from {first.store.path / 'step_000001'}",
    ]


def test_other_rows_under_the_same_name_are_refused_unless_they_are_allowed(saver, group):
    saver(save_steps=1).save_if_due(1, {})
    again = {"load_enable": True, "save_steps": 1}
    group.submit("set", 8, activity="").result()
    with pytest.raises(
        UserError, match=r"data\.dataset: the files have other contents .*allow_changes=\[data\.dataset"
    ):
        saver("other", **again).resume(print)
    assert group.submit("get", activity="").result() == 8, "nothing has been loaded"
    assert saver("other", allow_changes=["data.dataset"], **again).resume(print) == 1
    assert saver(**again).resume(print) == 1


def test_a_fresh_run_starts_at_0_and_never_among_old_checkpoints(saver):
    assert saver(load_enable=True).resume(print) == 0
    one = saver(save_steps=1)
    assert one.resume(print) == 0
    one.save(3, "step")
    with pytest.raises(UserError, match=r"ckpt\.path=.*step 3.*ckpt\.load_enable=true"):
        saver(save_steps=1).resume(print)


def test_the_final_models_have_their_places(saver, group, tmp_path):
    group.submit("set", 9, activity="").result()
    assert saver().export() == tmp_path / "run" / "model"
    assert (tmp_path / "run" / "model" / "number").read_text() == "9"
    assert saver(output_dir=str(tmp_path / "out")).export() == tmp_path / "out"


def test_save_hf_puts_the_model_into_the_checkpoint(saver):
    one = saver(save_steps=1, save_hf=True)
    one.save_if_due(1, {})
    assert (one.store.latest().path / "hf" / "number").exists()


def test_metric_json_has_the_metrics_of_the_step_and_the_rule_of_the_best(saver):
    one = saver(save_steps=1)
    one.save_if_due(1, {"eval/gpt_loss": 2.0}, lambda: {"train/gpt_loss": 2.5, "eval/gpt_loss": 2.0})
    one.save_if_due(2, {"eval/gpt_loss": 3.0}, lambda: {"train/gpt_loss": 1.5, "eval/gpt_loss": 3.0})
    said = json.loads((one.store.path / "step_000002" / "metric.json").read_text())
    assert said == {
        "step": 2,
        "metrics": {"train/gpt_loss": 1.5, "eval/gpt_loss": 3.0},
        "best": {"metric": "eval/gpt_loss", "lower_is_better": True, "best_so_far": 2.0},
    }
    assert "metric.json" in one.store.latest().check_sizes()


def test_weights_alone_are_saved_and_resumed_from_only_when_that_is_asked_for(saver, group):
    saver(save_steps=1, disable_ds=True).save_if_due(1, {})
    said = []
    with pytest.raises(UserError, match=r"has only weights .*ckpt\.disable_ds=true.*ckpt\.reset_optimizer=true"):
        saver(save_steps=1, load_enable=True).resume(said.append)
    assert group.submit("get_asked", activity="").result() == [False], "saved without, and nothing loaded"
    assert saver(save_steps=1, load_enable=True, reset_optimizer=True).resume(said.append) == 1
    assert group.submit("get_asked", activity="").result() == [False, False]
    assert "ckpt.reset_optimizer: false -> true" in said[0]
    saver(save_steps=1, load_enable=True, reset_optimizer=True).save_if_due(2, {})
    assert saver(save_steps=1, load_enable=True).resume(said.append) == 2
    assert group.submit("get_asked", activity="").result() == [False, False, True, True]


def test_checkpoints_go_where_ckpt_path_says(saver, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = saver(save_steps=1, path="elsewhere")
    one.save_if_due(1, {})
    assert (tmp_path / "elsewhere" / "step_000001").is_dir()
    assert one.store.path.is_absolute()


def test_a_full_disk_ends_the_run_in_one_message_and_keeps_the_last_checkpoint(small, group, monkeypatch):
    folder = RunFolder(small / "run")
    folder.start("abc")
    one = Saver(
        CheckpointConfig.of("sft", save_steps=1),
        folder,
        {"actor": group},
        "eval/gpt_loss",
        TrainingRows("data.dataset", "all"),
    )
    one.save(1, "step")

    def save_state(self, place: Path, with_optimizer: bool) -> Entries:
        fill(place)
        return write_tensors(place / "number", torch.zeros(1000))

    monkeypatch.setattr(Counter, "save_state", save_state)
    with pytest.raises(DiskError, match=r"step_000002\.tmp cannot be written: the disk is full"):
        one.save(2, "step")
    assert names(one) == ["step_000001"], "what could not be written is gone, so there is room again"
    folder.mark_failed("full")
    assert folder.status()["state"] == "failed"


def test_a_folder_of_checkpoints_that_cannot_be_written_is_one_message(small, saver):
    one = saver(save_steps=1, path=str(small))
    make_read_only(small)
    with pytest.raises(DiskError, match=f"{small} cannot be written: Read-only file system"):
        one.save(1, "step")


def test_a_resumed_run_is_the_run_whose_checkpoint_it_continues(saver, tmp_path):
    first = saver(save_steps=1, path=str(tmp_path / "shared"))
    first.folder.start("abc")
    first.save(1, "step")
    again = RunFolder(tmp_path / "again")
    again.start("abc")
    config = CheckpointConfig.of("sft", path=str(tmp_path / "shared"), load_enable=True)
    parts = (first.rows, {"beta": Beta()}, {"notes": Notes()})
    Saver(config, again, first.groups, "eval/gpt_loss", *parts).resume(lambda text: None)
    assert again.run_id == first.folder.run_id
