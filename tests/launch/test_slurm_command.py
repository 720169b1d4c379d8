"""What a Slurm job of a sweep runs, the first time and after Slurm has queued it again."""

from __future__ import annotations

import pytest

from rlhf_suite.cli import main
from rlhf_suite.sweeps.slurm_jobs import Command

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


def test_a_tool_without_a_state_starts_again():
    words = ["task=merge_lora", "actor.model_name_or_path=builtin:tiny"]
    assert not Command(words, main, 0).can_resume()
    assert Command(PRINTS, main, 0).can_resume()
