"""An actor that is killed in mid-run: an engine is started again and the run goes on as if nothing had happened; where
that cannot be, the run ends at once, with the name of the actor, what it was doing, and its last words."""

from __future__ import annotations

import json
import re

import jobs
import pytest

from rlhf_suite.tracking.metrics import read_rows

ENDED_S = 60.0
GONE_S = 15.0


@pytest.mark.proof  # tests/distributed/test_workers.py kills an actor of a group on every commit
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
    words += ["data.max_samples=1024", "eval.steps=1000", "algo.kl.init_coef=0", "vllm.max_restarts=0"]
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


STEPS = 8
LONG = [
    *jobs.SMALL,
    "algo.advantage.estimator=dr_grpo",
    "algo.kl.init_coef=0",
    "rollout.n_samples_per_prompt=16",
    "train.batch_size=32",
    f"train.max_steps={STEPS}",
    "eval.steps=4",
]
AHEAD = ["correction=tis", "train.async_enable=true"]
STREAM = [*AHEAD, "train.async_queue_size=2", "train.partial_rollout_enable=true"]
SHARED = [word for word in STREAM if word != "train.async_enable=true"]
SHARED += ["train.colocate_all=true", "vllm.enable_sleep=true", "ds.enable_sleep=true"]


def run_with_deaths(folder, words, actor, after=(2,)):
    """Kill an engine after each of these steps while the run goes on, and return the rows of its steps."""
    job = jobs.Job(folder, words)
    for step in after:
        job.wait_for_step(step)
        job.actor(actor).kill()
    ended = job.ended()
    assert ended.code == 0, ended.err
    for number in range(1, len(after) + 1):
        assert f"{actor} died during" in ended.err and f"(restart {number} of 3, vllm.max_restarts)" in ended.err
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "perf/engine_restarts" in row]
    assert [row["perf/engine_restarts"] for row in rows if row["step"] in (1, STEPS)] == [0, len(after)]
    return jobs.train_rows(folder)


@pytest.mark.proof
@pytest.mark.parametrize(("mode", "engines"), [([], 1), (AHEAD, 2)])
def test_a_run_whose_engine_was_killed_gives_the_same_numbers(runs, warm, mode, engines):
    words = [*LONG, *mode, f"vllm.num_engines={engines}", f"actor.model_name_or_path={warm}"]
    whole, killed = (runs / f"{name}_{engines}_engines" for name in ("whole", "engine_killed"))
    jobs.run(whole, words)
    rows = run_with_deaths(killed, words, f"engine-{engines - 1}")
    assert jobs.digest(killed) == jobs.digest(whole)
    assert jobs.timeless(rows) == jobs.timeless(jobs.train_rows(whole))
    assert jobs.timeless(jobs.eval_rows(killed)) == jobs.timeless(jobs.eval_rows(whole))
    for step in range(1, STEPS + 1):
        assert jobs.rollout(killed, step) == jobs.rollout(whole, step)


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["beside", "shared"])
def test_a_stream_whose_engine_was_killed_trains_on_every_group_once(runs, warm, mode):
    """On shared devices the engines pause while the models train: they die in a pause or not."""
    killed, words = runs / f"stream_{mode}_engine_killed", STREAM if mode == "beside" else SHARED
    after = (2,) if mode == "beside" else (2, 4)
    run_with_deaths(killed, [*LONG, *words, f"actor.model_name_or_path={warm}"], "engine-0", after)
    trained = []
    for step in range(STEPS):
        samples = jobs.rollout(killed, step + 1)
        trained += [sample["prompt_index"] for sample in samples if sample["sample"] == 0]
        versions = jobs.column(samples, "weight_version")
        assert step - 2 <= versions[versions >= 0].min() <= versions.max() <= step
    assert len(trained) == len({*trained}) == 4 * STEPS


EVALUATED = [
    *LONG,
    "train.max_steps=3",
    "eval.steps=2",
    "eval.temperature=1",
    "eval.max_samples=64",
    "eval.n_samples_per_prompt=8",
    "vllm.max_num_seqs=4",  # so that an evaluation takes long
]


@pytest.mark.proof
def test_an_engine_that_is_killed_during_an_evaluation_changes_no_number(runs, warm):
    words = [*EVALUATED, f"actor.model_name_or_path={warm}"]
    whole, killed = (runs / f"evaluation_{name}" for name in ("whole", "engine_killed"))
    jobs.run(whole, words)
    job = jobs.Job(killed, words)
    job.wait_for_step(2)
    job.wait_for((job.folder.rollouts / "step_000002.parquet").exists)  # the evaluation begins
    job.actor("engine-0").kill()
    ended = job.ended()
    assert ended.code == 0, ended.err
    again = re.search(r"engine-0 runs again: its (\d+) unfinished requests are sent again", ended.out)
    assert again and int(again[1]) > 64, "more than a step has: the evaluation was under way"
    assert jobs.timeless(jobs.eval_rows(killed)) == jobs.timeless(jobs.eval_rows(whole))
    assert jobs.digest(killed) == jobs.digest(whole)
