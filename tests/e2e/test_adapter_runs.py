"""Runs with LoRA whose engines hold the base model: each weight sync brings the adapters alone, whatever the schedule,
and a run whose engine dies, or that is stopped and continued, has the numbers of an undisturbed one."""

from __future__ import annotations

import signal

import jobs
import numpy as np
import pytest

from rlhf_suite.tracking.metrics import read_rows

STEPS = 6
RANK = 8
WORDS = [
    *(word for word in jobs.SMALL if not word.startswith("eval.")),
    "algo.advantage.estimator=dr_grpo",
    "algo.kl.init_coef=0.05",
    f"ds.lora.rank={RANK}",
    "actor.adam.lr=0.01",
    "eval.dataset=null",
    "eval.steps=-1",
    "data.max_samples=1024",
    f"train.max_steps={STEPS}",
]
AHEAD = ["correction=tis", "train.async_enable=true", "train.async_queue_size=1"]
STREAM = [
    *("correction=tis", "train.async_enable=true", "train.async_queue_size=3"),
    *("train.partial_rollout_enable=true", "train.async_run_ahead=2"),
    "vllm.max_num_seqs=4",  # so that some responses are unfinished whenever a batch is complete
]
SHARED = [
    *(word for word in STREAM if word != "train.async_enable=true"),
    *("train.colocate_all=true", "vllm.enable_sleep=true", "ds.enable_sleep=true"),
]


def syncs(folder) -> list[dict[str, float]]:
    """The rows of weight syncs, of which the engines hold and compute what the trainer does."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "sync/probe" in row]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    for row in rows:
        assert row["sync/read_back"] == row["sync/tensors"] == 2 * 7 * 2
        assert row["sync/probe"] < 3e-6  # of every token, prompts too: the unlikely ones have larger errors
    return rows


@pytest.fixture(scope="module")
def whole(runs, warm):
    folder = runs / "adapters"
    ended = jobs.run(folder, [*WORDS, "ckpt.save_steps=1", f"actor.model_name_or_path={warm}"])
    assert "Weight syncs: only the adapters" in ended.out
    return folder


def test_engines_agree_with_the_trainer_on_every_token_of_a_run(whole):
    rows = jobs.train_rows(whole)
    assert [row["mismatch/mean"] < 1e-6 for row in rows] == [True] * STEPS
    assert abs(rows[-1]["train/kl"]) > 1e-3, "the adapters have moved away from the reference"


@pytest.mark.proof
def test_a_sync_brings_the_adapters_alone(whole, runs, warm):
    """The same run with merged weights has the same rewards and samples the same tokens."""
    ended = jobs.run(runs / "merged", [*WORDS, "vllm.sync_adapters=false", f"actor.model_name_or_path={warm}"])
    assert "Weight syncs: whole weights with adapters merged (vllm.sync_adapters=false)" in ended.out
    merged = [row for row in read_rows(runs / "merged" / "metrics.jsonl") if "sync/probe" in row]
    for row, other in zip(syncs(whole), merged, strict=True):
        assert row["sync/bytes"] < other["sync/bytes"] / 2
        assert row["sync/bytes"] % (4 * RANK) == 0
    first, second = (jobs.rollout(folder, 1) for folder in (whole, runs / "merged"))
    assert [sample["response"] for sample in first] == [sample["response"] for sample in second]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("ahead", AHEAD, marks=pytest.mark.proof),
        pytest.param("stream", STREAM, marks=pytest.mark.proof),
        pytest.param("shared", SHARED, marks=pytest.mark.proof),
        pytest.param("gloo", ["vllm.sync_backend=gloo"], marks=pytest.mark.proof),
        pytest.param("zero3", ["actor.num_gpus_per_node=2", "ds.zero_stage=3"], marks=pytest.mark.proof),
    ],
)
def test_every_schedule_syncs_adapters(runs, warm, name, words):
    folder = runs / f"adapters_{name}"
    jobs.run(folder, [*WORDS, *words, f"actor.model_name_or_path={warm}"])
    syncs(folder)
    mixed = 0
    for step, row in enumerate(jobs.train_rows(folder)):
        assert row.get("mismatch/mean", 0) < 1e-6, "where the same weights wrote and read"
        for sample in jobs.rollout(folder, step + 1):
            mixed += len({version for version in sample["weight_version"] if version >= 0}) > 1
    assert (mixed > 0) == ("train.partial_rollout_enable=true" in words)


@pytest.mark.proof
@pytest.mark.parametrize("words", [[], ["vllm.sync_backend=gloo"]], ids=str)
def test_an_engine_that_dies_changes_no_number(whole, runs, warm, words):
    """The engine in its place gets the base model and the last adapters."""
    folder = runs / f"adapters_engine_killed{len(words)}"
    job = jobs.Job(folder, [*WORDS, *words, f"actor.model_name_or_path={warm}"])
    job.wait_for_step(2)
    job.actor("engine-0").kill()
    ended = job.ended()
    assert ended.code == 0, ended.err
    assert "(restart 1 of 3, vllm.max_restarts)" in ended.err
    assert jobs.digest(folder) == jobs.digest(whole)
    rows, expected = (jobs.timeless(jobs.train_rows(each)) for each in (folder, whole))
    assert [row["train/reward"] for row in rows] == [row["train/reward"] for row in expected]


@pytest.mark.proof
def test_a_stopped_run_goes_on_with_base_and_adapters(whole, runs, warm):
    folder, words = runs / "adapters_stopped", [*WORDS, "ckpt.save_steps=1", f"actor.model_name_or_path={warm}"]
    job = jobs.Job(folder, words)
    job.wait_for_step(2)
    for process in job.family():
        process.send_signal(signal.SIGTERM)
    assert job.ended().code == 128 + signal.SIGTERM
    jobs.run(folder, [*words, "ckpt.load_enable=true"])
    assert jobs.digest(folder) == jobs.digest(whole)
    for step in range(1, STEPS + 1):
        mine, theirs = (jobs.column(jobs.rollout(each, step), "engine_log_probs") for each in (folder, whole))
        assert np.array_equal(mine, theirs)
