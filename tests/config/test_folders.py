"""Where a run goes: a fresh folder, the named one, or that of the run it continues."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_suite.cli.folders import Place, for_run, fresh
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resolve import fingerprint
from rlhf_suite.train.run_folder import RunFolder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def earlier_run(folder, run, age_s):
    record = RunFolder(folder)
    record.start(fingerprint(run))
    when = folder.stat().st_mtime - age_s
    os.utime(record.status_file, (when, when))


def test_two_runs_of_the_same_second_get_two_folders(tmp_path):
    folders = [fresh(tmp_path / "run") for _ in range(3)]
    assert [folder.name for folder in folders] == ["run", "run-1", "run-2"]


def test_a_run_goes_below_outputs_by_task_and_time(checked, here):
    place = for_run(checked("task=sft"))
    assert isinstance(place, Place)
    assert place.folder.parts[:2] == ("outputs", "sft")
    assert place.folder.is_dir()


def test_load_enable_finds_the_newest_run_of_the_same_configuration(checked, here):
    other, same = checked("task=sft train.seed=1").runs[0], checked("task=sft").runs[0]
    earlier_run(here / "outputs/sft/a", same, age_s=30)
    earlier_run(here / "outputs/sft/b", same, age_s=20)
    earlier_run(here / "outputs/sft/c", other, age_s=10)
    place = for_run(checked("task=sft ckpt.load_enable=true logger.logging_steps=5"))
    assert isinstance(place, Place)
    assert place.folder.name == "b"
    assert "continuing the run" in place.note


def test_load_enable_without_an_earlier_run_starts_afresh_and_says_so(checked, here):
    place = for_run(checked("task=sft ckpt.load_enable=true"))
    assert isinstance(place, Place)
    assert list(place.folder.iterdir()) == []
    assert "starting afresh" in place.note


def test_checkpoints_named_by_path_are_continued_in_a_new_folder(checked, here):
    earlier_run(here / "outputs/sft/a", checked("task=sft ckpt.path=x").runs[0], age_s=0)
    place = for_run(checked("task=sft ckpt.path=x ckpt.load_enable=true"))
    assert isinstance(place, Place)
    assert place.folder.name != "a"


def test_the_nodes_of_a_slurm_job_share_a_folder_that_is_named(checked, here, monkeypatch):
    earlier_run(here / "mine", checked("task=sft").runs[0], age_s=0)  # the first node has begun already
    for name, value in {"PROCID": 1, "STEP_NUM_NODES": 2, "NTASKS": 2, "JOB_ID": 5}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert for_run(checked("task=ppo hydra.run.dir=mine")) == Place(Path("mine"))
    assert for_run(checked("task=sft actor.num_nodes=2 train.micro_batch_size=32 hydra.run.dir=mine")) == Place(
        Path("mine")
    )
    refused = for_run(checked("task=ppo"))
    assert isinstance(refused, Problem)
    assert "run_dir=<folder>" in refused.fix


LOOP = "task=rejection_sampling hydra.run.dir=mine"
ONE_PROCESS = "task=check_reward hydra.run.dir=mine"


@pytest.mark.parametrize(("line", "words"), [(LOOP, "each stage of task=rejection_sampling"), (ONE_PROCESS, "idle")])
def test_what_cannot_use_the_nodes_of_a_slurm_job_is_refused_on_each_of_them(checked, here, monkeypatch, line, words):
    for name, value in {"STEP_NUM_NODES": 2, "NTASKS": 2, "JOB_ID": 5}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    for rank in "01":
        monkeypatch.setenv("SLURM_PROCID", rank)
        refused = for_run(checked(line))
        assert isinstance(refused, Problem) and refused.key == "task"
        assert words in refused.what and "srun --nodes=1" in refused.fix
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    assert for_run(checked(line)) == Place(Path("mine"))


def test_a_named_folder_that_holds_a_run_is_only_continued_on_purpose(checked, here):
    earlier_run(here / "mine", checked("task=sft").runs[0], age_s=0)
    refused = for_run(checked("task=sft hydra.run.dir=mine"))
    assert isinstance(refused, Problem)
    assert "ckpt.load_enable=true" in refused.fix
    place = for_run(checked("task=sft hydra.run.dir=mine ckpt.load_enable=true"))
    assert isinstance(place, Place)
    assert str(place.folder) == "mine"
