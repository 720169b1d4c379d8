"""Where a run goes: a fresh folder, the named one, or that of the run it continues."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.locks import InUse, alone_in, holder_of
from rlhf_suite.preflight.folders import Place, for_run, for_sweep, lock_folders
from rlhf_suite.run_folders.earlier_runs import fresh
from rlhf_suite.run_folders.record import fingerprint
from rlhf_suite.run_folders.run_folder import RunFolder


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


@pytest.mark.notices(
    "the oldest run is continued",
    "run_folders/earlier_runs.py",
    "key=modified_at, reverse=True)",
    "key=modified_at)",
)
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
    assert "starting a new run" in place.note


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


@pytest.mark.parametrize("name", ["hydra.run.dir", "run_dir"])
def test_a_named_folder_that_holds_a_run_is_only_continued_on_purpose(checked, here, name):
    earlier_run(here / "mine", checked("task=sft").runs[0], age_s=0)
    RunFolder(here / "mine").record_step(1)
    refused = for_run(checked(f"task=sft {name}=mine"))
    assert isinstance(refused, Problem)
    assert "ckpt.load_enable=true" in refused.fix
    place = for_run(checked(f"task=sft {name}=mine ckpt.load_enable=true"))
    assert isinstance(place, Place)
    assert str(place.folder) == "mine"


def test_a_run_that_ended_before_its_first_step_does_not_block_its_folder(checked, here):
    earlier_run(here / "mine", checked("task=sft").runs[0], age_s=0)
    record = RunFolder(here / "mine")
    name = record.run_id
    record.mark_failed(ValueError("no such model"))
    assert for_run(checked("task=sft run_dir=mine")) == Place(Path("mine"))
    record.start("again")
    assert record.run_id == name, "it is the same run"
    record.mark_done({})
    refused = for_run(checked("task=chat run_dir=mine"))
    assert isinstance(refused, Problem) and "load_enable" not in refused.fix, "a tool cannot continue"


def test_a_folder_in_which_a_run_works_is_refused_with_who_it_is(checked, here):
    earlier_run(here / "outputs/sft/a", checked("task=sft").runs[0], age_s=0)
    with alone_in(here / "outputs/sft/a", "mine"):
        for line in ("run_dir=outputs/sft/a", "run_dir=outputs/sft/a ckpt.load_enable=true", "ckpt.load_enable=true"):
            refused = for_run(checked(f"task=sft {line}"))
            assert isinstance(refused, Problem)
            assert f"process {os.getpid()} on {socket.gethostname()}" in refused.what
            assert "run_dir=<folder>" in refused.fix
    assert isinstance(for_run(checked("task=sft run_dir=outputs/sft/a")), Place)


def test_checkpoints_that_a_run_works_with_are_its_own(checked, here):
    run = checked("task=sft ckpt.path=shared").runs[0]
    refused = pytest.raises(InUse, match=r"ckpt\.path=shared: another run works there")
    with lock_folders(here / "a", run), refused, lock_folders(here / "b", run):
        pass
    with lock_folders(here / "b", run):
        pass


def test_a_lock_of_a_killed_process_is_free(here):
    code = "import os, sys; from pathlib import Path; from rlhf_suite.locks import alone_in\n"
    code += "with alone_in(Path('mine'), 'x'): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert holder_of(here / "mine") is None
    with alone_in(here / "mine", "x"):
        assert f"process {os.getpid()}" in (holder_of(here / "mine") or "")


@pytest.mark.parametrize("name", ["config.yaml", "model", "logs"])
def test_a_folder_with_files_that_a_run_would_write_over_is_not_a_runs(checked, here, name):
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").touch()
    assert isinstance(for_run(checked("task=sft run_dir=mine")), Place)
    (here / "mine" / name).write_text("precious")
    refused = for_run(checked("task=sft run_dir=mine"))
    assert isinstance(refused, Problem) and f"would write over its {name}" in refused.what
    assert (here / "mine" / name).read_text() == "precious"


@pytest.mark.parametrize(
    ("folder", "reason"), [("file", "Not a directory"), ("x" * 250, "too long"), ("/proc/x", "No such file")]
)
@pytest.mark.parametrize("mode", ["", "-m train.seed=1,2 "])
def test_a_folder_that_cannot_be_made_is_refused(checked, here, folder, reason, mode):
    (here / "file").touch()
    found = checked(f"{mode}task=sft run_dir={folder}")
    assert not found.problems
    refused = for_sweep(found) if mode else for_run(found)
    assert isinstance(refused, Problem) and refused.key == "run_dir" and reason in refused.what
    assert [each.name for each in here.iterdir()] == ["file"]


def test_run_dir_is_one_folder_and_that_of_the_whole_sweep(checked, here):
    assert checked("-m task=sft run_dir=mine train.seed=1,2").folder == Path("mine")
    assert checked("task=sft run_dir=~/mine").folder == Path.home() / "mine"
    job = checked("task=sft run_dir=mine hydra.run.dir=mine/0 hydra.job.num=0 hydra.mode=RUN")
    assert (job.folder, job.problems) == (Path("mine/0"), [])
    for line in ("-m task=sft run_dir=a,b", "task=sft run_dir=a hydra.run.dir=b"):
        (problem,) = checked(line).problems
        assert (problem.key, problem.what) == ("run_dir", "a and b")


def test_the_jobs_of_a_sweep_write_different_models(checked, here):
    refused = for_sweep(checked("-m task=sft ckpt.output_dir=out train.seed=1,2"))
    assert isinstance(refused, Problem)
    assert "2 jobs of the sweep would write" in refused.what and "${train.seed}" in refused.fix
    assert isinstance(for_sweep(checked("-m task=sft ckpt.output_dir='out-${train.seed}' train.seed=1,2")), Path)
    assert isinstance(for_sweep(checked("-m task=sft train.seed=1,2")), Path)


def test_a_run_is_refused_more_nodes_than_it_has(checked, here):
    line = "task=sft demo=sft actor.num_nodes=2 train.micro_batch_size=1"
    refused = for_run(checked(line))
    assert isinstance(refused, Problem)
    assert (refused.key, refused.what) == ("actor.num_nodes", "2 nodes, but the run has 1")
    assert isinstance(for_run(checked(f"{line} launch.ray_address=auto")), Place)
    assert isinstance(for_run(checked(f"{line} hydra/launcher=slurm hydra.launcher.nodes=2")), Place)
