"""What a Slurm job of a sweep runs, the first time and after Slurm has queued it again."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from rlhf_suite.cli import main
from rlhf_suite.launch import slurm
from rlhf_suite.sweeps.slurm_jobs import LOST_TRIES, REQUEUE, Command

PRINTS = ["task=sft", "actor.model_name_or_path=builtin:tiny", "data.dataset=builtin:reverse", "--cfg", "job"]


@pytest.mark.notices(
    "a job that Slurm queued again begins from the start",
    "sweeps/slurm_jobs.py",
    "restarts > 0 and",
    "restarts > 1 and",
)
@pytest.mark.parametrize(("restarts", "resumes"), [(None, False), ("0", False), ("1", True), ("2", True)])
def test_a_job_that_was_queued_again_continues_its_run(monkeypatch, capfd, restarts, resumes):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    Command(PRINTS, main, 0)()
    assert f"load_enable: {str(resumes).lower()}" in capfd.readouterr().out


@pytest.mark.notices(
    "a job of Slurm that fails ends as one that succeeded",
    "sweeps/slurm_jobs.py",
    "        if code:  # below 0",
    "        if code < 0:  # below 0",
)
def test_a_job_that_fails_is_a_failure_for_slurm(capfd):
    """By its exit code: an exception would be printed by submitit, with a traceback below the reason."""
    with pytest.raises(SystemExit) as end:
        Command(["task=nothing"], main, 0)()
    assert end.value.code == 2
    assert "1 problem in the configuration" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("answer", "requeued", "said"),
    [
        (None, 0, "no answer"),  # as in a container without Slurm's programs
        ("sleep 3600", 0, "no answer"),
        ("echo JobId=7 JobState=RUNNING NumNodes=1 PreemptTime=2026-11-26T17:26:10", 1, ""),
        ("echo JobId=7 JobState=CANCELLED NumNodes=1 PreemptTime=None", 0, ""),
    ],
)
def test_a_job_that_slurm_ends_asks_why(tmp_path, monkeypatch, capfd, answer, requeued, said):
    raised = []
    monkeypatch.setattr("signal.raise_signal", raised.append)
    monkeypatch.setattr(slurm, "ANSWER_S", 0.2 if answer == "sleep 3600" else 300)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if answer is not None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\nexec {answer}\n")
        (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(SystemExit) as end:
        Command(["task=sft"], lambda words: 128 + signal.SIGTERM, 2)()
    assert (end.value.code, raised) == (143, [signal.SIGUSR2] * requeued)
    heard = capfd.readouterr().err
    assert said in heard if said else heard == ""


def test_a_tool_without_a_state_starts_again():
    words = ["task=merge_lora", "actor.model_name_or_path=builtin:tiny"]
    assert not Command(words, main, 0).can_resume()
    assert Command(PRINTS, main, 0).can_resume()


@pytest.mark.notices(
    "a job whose tasks have all begun is queued again by its script",
    "sweeps/slurm_jobs.py",
    "[ $begun -lt $SLURM_NNODES ]",
    "[ $begun -le $SLURM_NNODES ]",
)
@pytest.mark.parametrize(
    ("traces", "code", "state", "queued"),
    [
        (["begun-7-2-0", "ended-7-2-0"], 137, "RUNNING", True),  # the other task could not start
        ([], 1, "RUNNING", True),
        (["begun-7-2-0", "begun-7-2-1"], 137, "RUNNING", True),  # srun has killed the run: a node has booted
        (["begun-7-2-0", "begun-7-2-1", "ended-7-2-0"], 1, "RUNNING", False),  # the run has failed
        (["begun-7-2-0"], 0, "RUNNING", False),
        (["begun-7-2-0"], 137, "CANCELLED", False),
        ([f"lost-7-{number}" for number in range(LOST_TRIES)], 137, "RUNNING", False),
    ],
)
def test_a_job_whose_tasks_were_lost_is_queued_again(tmp_path, traces, code, state, queued):
    """As a node does to a job that starts on it at the moment of its return. The batch script asks `scontrol`."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho JobState={state}\n')
    scontrol.chmod(0o755)
    for name in (*traces, "begun-7-1-0"):  # and one of an earlier start
        (tmp_path / name).touch()
    words = f"{REQUEUE.format(folder=tmp_path, tries=LOST_TRIES)}\nexit {code}"
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_NNODES": "2"}
    variables = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    over = subprocess.run(["bash", "-c", words], env=variables, capture_output=True, text=True, check=False)
    asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
    assert over.returncode == code
    assert ("requeue 7" in asked) is queued
    assert ("tasks of the run were lost" in over.stderr) is queued
