"""An actor that is killed in mid-run ends the run at once, with its name, what it was doing, and its last words."""

from __future__ import annotations

import json

import jobs
import pytest

ENDED_S = 60.0
GONE_S = 15.0


@pytest.mark.parametrize(
    ("actor", "estimator", "doing"),
    [
        ("engine-0", "dr_grpo", (" generations: ", "the weight sync", "the log-probs of the probe")),
        (
            "actor-0",
            "reinforce",
            ("actor: update", "actor: log-probs", "actor: sending", "actor: freeing", "the weight sync", "the probe"),
        ),
    ],
)
def test_the_death_of_an_actor_ends_the_run_with_its_name(runs, warm, actor, estimator, doing):
    words = [*jobs.SMALL, f"actor.model_name_or_path={warm}", f"algo.advantage.estimator={estimator}"]
    words += ["data.max_samples=1024", "eval.steps=1000", "algo.kl.init_coef=0"]
    job = jobs.Job(runs / f"death_of_{actor}", words)
    job.wait_for_step(2)
    family = job.family()
    job.actor(actor).kill()
    ended = job.ended(ENDED_S)
    said = ended.err
    assert ended.code == 1, said
    first = next(line for line in said.splitlines() if " died during " in line)
    assert first.startswith(f"{actor} died during "), said
    assert any(phase in first for phase in doing), first
    assert str(job.folder.logs / f"{actor}.log") in said
    assert "Traceback" not in said
    status = json.loads(job.folder.status_file.read_text())
    assert status["state"] == "failed"
    assert first in status["error"]
    assert jobs.survivors(family, GONE_S) == []
