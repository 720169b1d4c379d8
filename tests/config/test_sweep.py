"""Sweeps: processes of their own, failures that stop nobody, and the record of it all."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlhf_suite.cli import main
from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.errors import UserError
from rlhf_suite.preflight.folders import for_sweep
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.run_folders.record import fingerprint, save
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.run_folders.sweep_folder import Job, Sweep, choose_metric, extend_sweep
from rlhf_suite.sweeps.launchers import jobs_of, places
from rlhf_suite.sweeps.local_jobs import gpu_slots, run_here
from rlhf_suite.sweeps.slurm_jobs import GONE_POLLS, submit, watch
from rlhf_suite.sweeps.table import finish

SITE = """# @package _global_
hydra:
  launcher:
    slurm_partition: gpu
    slurm_setup: [module load cuda]
launch:
  object_store_mb: 512
"""


def a_job(tmp_path, number, words=("--help",), done=None, error=None):
    """A job whose command is the help page (or fails), in a folder where a run has recorded its end."""
    folder = tmp_path / str(number)
    record = RunFolder(folder)
    if done is not None:
        record.start("")
        record.mark_done(done)
    elif error is not None:
        record.start("")
        record.mark_failed(error)
    return Job(number, ["task=sft", f"train.seed={number}"], str(folder), list(words))


@pytest.mark.notices("a sweep with a failed job succeeds", "sweeps/table.py", "return 1 if failed else 0", "return 0")
@pytest.mark.notices(
    "the reason of a job that wrote no status is forgotten",
    "sweeps/local_jobs.py",
    'f"exit code {process.returncode}" if process.returncode else ""',
    '""',
)
@pytest.mark.stack
def test_a_failing_job_stops_no_other_and_fails_the_sweep(tmp_path, capfd):
    jobs = [
        a_job(tmp_path, 0, done={"eval/gpt_loss": 1.25}),
        a_job(tmp_path, 1, words=["task=nope"]),
        a_job(tmp_path, 2, done={"eval/gpt_loss": 1.5}),
    ]
    run_here(extend_sweep(tmp_path, jobs), jobs, parallel=1, gpus_per_job=None)
    assert [job.state for job in jobs] == ["done", "failed", "done"]
    assert finish(tmp_path) == 1
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert [(row["state"], row["value"]) for row in rows] == [("done", 1.25), ("failed", None), ("done", 1.5)]
    table = (tmp_path / "summary.md").read_text()
    assert "| 0 | train.seed=0 | done | eval/gpt_loss=1.25 |" in table
    assert "task=sft" not in table  # what all jobs share says nothing
    assert "exit code 2" in capfd.readouterr().out


@pytest.mark.stack
def test_a_sweep_whose_jobs_are_done_succeeds(tmp_path):
    jobs = [a_job(tmp_path, 0, done={})]
    run_here(extend_sweep(tmp_path, jobs), jobs, parallel=1, gpus_per_job=None)
    assert finish(tmp_path) == 0


@pytest.mark.notices(
    "jobs beside each other write to one console",
    "sweeps/local_jobs.py",
    'str(Path(job.folder) / "job.log") if parallel > 1 else ""',
    'str(Path(job.folder) / "job.log") if parallel < 1 else ""',
)
@pytest.mark.stack
def test_parallel_jobs_have_logs_of_their_own(tmp_path):
    jobs = [a_job(tmp_path, number, words=["--help", "task=sft", "ckpt"], done={}) for number in range(2)]
    run_here(extend_sweep(tmp_path, jobs), jobs, parallel=2, gpus_per_job=None)
    assert all("ckpt.save_steps" in (tmp_path / str(number) / "job.log").read_text() for number in range(2))


def test_a_sweep_that_goes_on_keeps_the_rows_of_its_other_jobs(tmp_path):
    extend_sweep(tmp_path, [a_job(tmp_path, 0)])
    assert [job.number for job in extend_sweep(tmp_path, [a_job(tmp_path, 1)]).jobs] == [0, 1]


def test_jobs_that_run_again_replace_their_earlier_rows(tmp_path):
    extend_sweep(tmp_path, [a_job(tmp_path, 0), a_job(tmp_path, 1)])
    again = a_job(tmp_path, 0)
    again.overrides = ["later"]
    assert [job.overrides for job in extend_sweep(tmp_path, [again]).jobs] == [["later"], ["task=sft", "train.seed=1"]]


def continued(checked, tmp_path, values, flags="ckpt.load_enable=true"):
    """The numbers that jobs with these seeds get in the sweep that is in a folder."""
    found = checked(f"-m task=sft demo=sft train.seed={values} {flags} run_dir={tmp_path}")
    return [(number, folder.name) for number, folder in places(found, tmp_path)]


@pytest.mark.notices(
    "a continued sweep finds its jobs by their places on the command line",
    "sweeps/launchers.py",
    "same.get(cell(words), own) if resumes(run) else own",
    "own",
)
@pytest.mark.notices(
    "a new value of a continued sweep takes the folder of another job",
    "sweeps/launchers.py",
    "is_new and own in taken and not is_earlier(RunFolder(folder / subfolder), run)",
    "False",
)
@pytest.mark.notices(
    "a job that a longer sweep adds takes the folder of another",
    "sweeps/launchers.py",
    "number = next(count for count in itertools.count() if count not in taken)",
    "number = own",
)
def test_jobs_of_a_continued_sweep_are_found_by_their_words(checked, tmp_path):
    """Whatever their state and their place on the new command line; new ones get numbers that are free."""
    jobs = [a_job(tmp_path, 0, done={}), a_job(tmp_path, 1), a_job(tmp_path, 2, error="no memory")]
    for job, seed in zip(jobs, (5, 6, 7), strict=True):
        job.overrides = ["task=sft", "demo=sft", f"train.seed={seed}"]
    extend_sweep(tmp_path, jobs)
    numbers = [3, 2, 0, 4, 1]
    assert continued(checked, tmp_path, "4,7,5,8,6") == [(number, str(number)) for number in numbers]
    assert continued(checked, tmp_path, "4,7,5", flags="") == [(0, "0"), (1, "1"), (2, "2")]  # a new sweep


def test_a_sweep_may_continue_to_more_steps(checked, tmp_path):
    """Job 0 has other words, but is the run that job 0 may continue."""
    earlier = checked(f"-m task=sft demo=sft train.seed=5,6 train.max_steps=2 run_dir={tmp_path}")
    jobs = [Job(n, words, str(tmp_path / name), words) for n, (words, name) in enumerate(earlier.jobs)]
    for job, run in zip(jobs, earlier.runs, strict=True):
        RunFolder(Path(job.folder)).start(fingerprint(run))
        save(run, RunFolder(Path(job.folder)).config)
    extend_sweep(tmp_path, jobs)
    flags = "train.max_steps=3 ckpt.load_enable=true 'ckpt.allow_changes=[train.max_steps]'"
    assert continued(checked, tmp_path, "5,6,7", flags) == [(0, "0"), (1, "1"), (2, "2")]


@pytest.mark.notices(
    "the job of a sweep that was killed counts as running",
    "run_folders/sweep_folder.py",
    'status["state"] == "running" and is_alive(status)',
    'status["state"] == "running"',
)
def test_the_table_of_a_sweep_that_nobody_waited_for(tmp_path, capsys):
    jobs = [a_job(tmp_path, 0, done={"eval/gpt_loss": 1.5}), a_job(tmp_path, 1), a_job(tmp_path, 2), a_job(tmp_path, 3)]
    RunFolder(tmp_path / "2").start("")
    RunFolder(tmp_path / "3").start("")
    status = json.loads((tmp_path / "3" / "status.json").read_text())
    (tmp_path / "3" / "status.json").write_text(json.dumps(status | {"pid": 2**30}))
    for job in jobs:
        job.state = f"submitted as 7_{job.number}"
    extend_sweep(tmp_path, jobs)
    assert main(["sweep", "status", str(tmp_path)]) == 1
    states = ["done", "submitted as 7_1", "running", "failed"]
    assert [row["state"] for row in json.loads((tmp_path / "summary.json").read_text())] == states
    assert "#3 failed: it was killed" in capsys.readouterr().out
    assert "| 0 | train.seed=0 | done | eval/gpt_loss=1.5 |" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("words", [["status"], ["status", "nowhere"], ["now", "."]])
def test_a_wrong_question_about_a_sweep_is_one_message(words, capsys):
    assert main(["sweep", *words]) == 2
    assert capsys.readouterr().err.startswith(("usage: rlhf-suite sweep", "nowhere is not the folder of a sweep"))


@pytest.mark.notices(
    "the GPUs of two slots overlap",
    "sweeps/local_jobs.py",
    "devices[slot * gpus_per_job : (slot + 1) * gpus_per_job]",
    "devices[slot : slot + gpus_per_job]",
)
def test_slots_split_the_visible_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert list(gpu_slots(2, 2)) == [["4", "5"], ["6", "7"]]
    assert list(gpu_slots(2, None)) == [None, None]
    with pytest.raises(UserError, match="need 6 GPUs, and 4 are visible"):
        list(gpu_slots(3, 2))


@pytest.mark.notices(
    "a job of a sweep gets a GPU that is hidden",
    "sweeps/local_jobs.py",
    "devices = list_gpus()",
    'devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")',
)
@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("NoDevFiles", 0), ("0, 2,", 2)])
def test_slots_have_no_gpu_that_is_hidden(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=rf"need 3 GPUs, and {count} are visible"):
        list(gpu_slots(3, 1))
    assert list(gpu_slots(count, 1)) == [["0"], ["2"]][:count]


@pytest.mark.notices(
    "a run is judged by its training loss, though it was evaluated",
    "run_folders/sweep_folder.py",
    "(*CHOSEN, *evaluated, *metrics)",
    "metrics",
)
@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({"train/gpt_loss": 1, "eval/a/gpt_loss": 2, "eval/gpt_loss": 3}, "eval/gpt_loss"),
        ({"train/loss": 1, "eval/accuracy": 2}, "eval/accuracy"),
        ({"train/loss": 1}, "train/loss"),
        ({}, ""),
    ],
)
def test_a_run_is_judged_by_its_evaluation(metrics, name):
    assert choose_metric(metrics) == (name, metrics.get(name))


def watched(tmp_path, jobs, states):
    """Watch Slurm jobs whose states at each poll are listed; returns the number of polls."""
    polls = iter(states)
    sweep = Sweep(tmp_path, jobs)
    for job in jobs:
        job.started = time.time()
    seen = []
    watch(sweep, {f"7_{job.number}": job for job in jobs}, 0.0, lambda numbers: seen.append(numbers) or next(polls))
    return len(seen)


@pytest.mark.notices(
    "where Slurm is not installed, the message asks whether it is",
    "sweeps/slurm_jobs.py",
    'if shutil.which("srun") is None:',
    "if False:",
)
def test_a_machine_without_slurm_is_told_from_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"srun is not found: this machine has no Slurm.* on a login node"):
        submit(Sweep(tmp_path, [a_job(tmp_path, 0)]), [], {"max_num_timeout": 1}, len)


def test_a_slurm_job_is_over_when_its_run_says_done(tmp_path):
    job = a_job(tmp_path, 0, done={"eval/pass1": 0.5})
    assert watched(tmp_path, [job], [{"7_0": "RUNNING"}, {"7_0": "COMPLETING"}]) == 2  # it still writes its page
    assert (job.state, job.value) == ("done", 0.5)


def test_a_slurm_job_that_was_killed_without_a_word_is_noticed(tmp_path):
    job = a_job(tmp_path, 0)
    (tmp_path / "err").write_text("slurmstepd: oom-kill\n")
    job.log = str(tmp_path / "err")
    assert watched(tmp_path, [job], [{"7_0": "RUNNING"}, *[{"7_0": "OUT_OF_MEMORY"}] * GONE_POLLS]) == 1 + GONE_POLLS
    assert job.state == "failed"
    assert "OUT_OF_MEMORY" in job.error
    assert "oom-kill" in job.error


@pytest.mark.notices(
    "a Slurm job is given up after three absences in all",
    "sweeps/slurm_jobs.py",
    "missing[number] + 1 if gone else 0",
    "missing[number] + 1 if gone else missing[number]",
)
def test_a_requeued_slurm_job_is_waited_for(tmp_path):
    job = a_job(tmp_path, 0, error="SystemExit: 143")
    states = [{"7_0": "PREEMPTED"}, {}, {"7_0": "PENDING"}, {"7_0": "RUNNING"}, {}, {}, {}]
    assert watched(tmp_path, [job], states) == len(states)
    assert (job.state, job.error) == ("failed", "SystemExit: 143")


@pytest.mark.notices(
    "jobs are given up while squeue does not answer",
    "sweeps/slurm_jobs.py",
    'gone = now.get(number, "COMPLETED") in ENDED',
    'gone = now.get(number, "COMPLETED") not in ("RUNNING", "PENDING")',
)
def test_jobs_are_not_given_up_while_slurm_does_not_answer(tmp_path, capsys):
    job = a_job(tmp_path, 0)
    silent = [{"7_0": "UNKNOWN"}] * (2 * GONE_POLLS)
    assert watched(tmp_path, [job], [*silent, *[{"7_0": "FAILED"}] * GONE_POLLS]) == 3 * GONE_POLLS
    assert capsys.readouterr().out.count("does not answer") == 1


def test_the_jobs_of_a_sweep_are_their_words_and_folders(checked):
    """Presets vary more slowly than values."""
    found = checked("-m task=sft demo=sft train.seed=1,2 ds=zero2,zero3 hydra.sweep.subdir='s${hydra.job.num}'")
    words = [["task=sft", "demo=sft", f"ds={ds}", f"train.seed={seed}"] for ds in ("zero2", "zero3") for seed in (1, 2)]
    assert found.jobs == [(each, f"s{number}") for number, each in enumerate(words)]
    assert [(run.ds.zero_stage, run.train.seed) for run in found.runs] == [(2, 1), (2, 2), (3, 1), (3, 2)]


@pytest.mark.parametrize("sweep", ["-m train.seed=1,2", "train.seed=1"])
def test_a_job_of_slurm_composes_with_a_preset_of_its_site(tmp_path, sweep):
    """The preset has settings that no other launcher has; a job is not submitted again."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "site.yaml").write_text(SITE)
    line = parse(f"{sweep} task=sft demo=sft hydra/launcher=slurm launch=site --config-dir {tmp_path}".split())
    found = preflight(line)
    assert found.problems == []
    assert found.is_submitted != found.is_sweep
    assert found.hydra.launcher.slurm_partition == "gpu"
    for job in jobs_of(line, found, tmp_path / "sweep"):
        alone = preflight(parse(job.words))
        assert alone.problems == [] and not (alone.is_sweep or alone.is_submitted)
        assert alone.runs[0].launch.object_store_mb == 512


@pytest.mark.notices(
    "a job inherits the settings of its sweep",
    "sweeps/launchers.py",
    "settings = [word for word in own if not word.startswith(NOT_FOR_JOBS)]",
    "settings = [*own]",
)
def test_a_job_has_not_the_settings_of_its_sweep(tmp_path):
    of_the_sweep = ["hydra.launcher.parallel=2", "hydra.sweep.subdir=s", "hydra/sweeper=basic"]
    line = parse(["-m", "task=sft", "demo=sft", "train.seed=1,2", "hydra.job.chdir=false", *of_the_sweep])
    for job in jobs_of(line, preflight(line), tmp_path):
        assert not set(of_the_sweep) & set(job.words)
        assert "hydra.job.chdir=false" in job.words and "hydra.mode=RUN" in job.words


def test_the_folder_of_a_job_may_be_named_after_its_words(checked):
    found = checked("-m task=sft demo=sft train.seed=1,2 'hydra.sweep.subdir=${hydra.job.override_dirname}'")
    assert [folder for _, folder in found.jobs] == [f"demo=sft,task=sft,train.seed={seed}" for seed in (1, 2)]


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"number": 1}]'])
def test_a_damaged_record_of_a_sweep_is_one_message(checked, tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    problem = for_sweep(checked(f"-m task=sft demo=sft train.seed=1,2 run_dir={tmp_path}"))
    assert isinstance(problem, Problem)
    assert problem.what.startswith(f"{tmp_path / 'summary.json'} is damaged") and problem.fix.startswith("delete it")


@pytest.mark.notices(
    "jobs of a sweep with one folder are started",
    "preflight/jobs.py",
    "if result.is_sweep and jobs > 1:",
    "if result.is_sweep and jobs > 2:",
)
@pytest.mark.parametrize("subfolder", ["", ".", "same", "'s${train.max_steps}'"])
def test_jobs_that_would_have_one_folder_are_refused(checked, subfolder):
    (problem,) = checked(f"-m task=sft demo=sft train.seed=1,2 hydra.sweep.subdir={subfolder or repr('')}").problems
    assert problem.key == "hydra.sweep.subdir" and "2 jobs of the sweep would have the folder" in problem.what
    assert checked(f"-m task=sft demo=sft train.seed=1 hydra.sweep.subdir={subfolder or repr('')}").problems == []


@pytest.mark.notices(
    "an empty name is the current folder", "preflight/jobs.py", "if not str(hydra[name].dir):", "if False:"
)
@pytest.mark.parametrize("word", ["hydra.run.dir=''", "-m hydra.sweep.dir='' train.seed=1,2"])
def test_an_empty_name_is_not_the_current_folder(checked, word):
    (problem,) = checked(f"task=sft demo=sft {word}").problems
    assert "an empty name would be the current folder" in problem.what


@pytest.mark.notices(
    "an interval is left out of a sweep without a word",
    "preflight/jobs.py",
    "if not sweep.is_discrete_sweep()]",
    "if sweep.is_discrete_sweep() is None]",
)
@pytest.mark.parametrize("values", ["interval(1e-6,1e-4)", "tag(log,interval(1e-6,1e-4))"])
def test_values_without_end_need_a_sweeper_that_chooses(checked, values):
    """They were left out, and one job ran with the default."""
    (problem,) = checked(f"-m task=sft demo=sft 'actor.adam.lr={values}'").problems
    assert problem.key == "actor.adam.lr" and "has no end of values" in problem.what
    assert "hydra/sweeper=<name> (optuna)" in problem.fix
