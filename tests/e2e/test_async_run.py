"""Runs whose rollouts are made while the policy trains: with weights of a fixed age, and as a stream of groups."""

from __future__ import annotations

import json

import jobs
import pytest

from rlhf_suite.tracking.metrics import read_rows

STEPS = jobs.ASYNC_STEPS
WORDS = [
    *(word for word in jobs.SMALL if not word.startswith("eval.")),
    "eval.dataset=null",
    "eval.steps=-1",
    "correction=tis",
    "train.async_enable=true",
    f"train.max_steps={STEPS}",
]
AHEAD = ["train.async_queue_size=1"]
STREAM = [
    "train.async_queue_size=3",
    "train.partial_rollout_enable=true",
    "train.async_run_ahead=2",
    "vllm.max_num_seqs=4",  # so that some responses are unfinished whenever a batch is complete
]


@pytest.fixture(scope="module", params=[pytest.param("ahead", marks=pytest.mark.proof), "stream"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def folder(mode, runs, request):
    if mode == "stream":
        return request.getfixturevalue("asynchronous_stream")
    folder, warm = runs / "async_ahead", request.getfixturevalue("warm")
    jobs.run(folder, [*WORDS, *AHEAD, f"actor.model_name_or_path={warm}"])
    return folder


def test_no_token_is_older_than_the_bound(mode, folder, record_property):
    ages = [row["async/staleness_max"] for row in jobs.train_rows(folder)]
    for step, row in enumerate(jobs.train_rows(folder)):
        samples = jobs.rollout(folder, step + 1)
        found = [len({version for version in sample["weight_version"] if version >= 0}) for sample in samples]
        assert row["async/versions_per_ledger"] == pytest.approx(sum(found) / len(found))
        versions = jobs.column(samples, "weight_version")
        versions = versions[versions >= 0]
        if mode == "ahead":
            assert {*versions} == {max(0, step - 1)}
        assert step - jobs.ASYNC_BOUND <= versions.min() <= versions.max() <= step
        assert row["async/staleness_max"] == step - versions.min()
        assert row["async/staleness_mean"] == pytest.approx(step - versions.mean())
    record_property(f"largest age in whole runs, of at most {jobs.ASYNC_BOUND}", int(max(ages)))
    assert len(ages) == STEPS and max(ages) > 0


def test_old_rollouts_are_corrected_and_new_ones_agree_with_the_trainer(folder):
    for row in jobs.train_rows(folder):
        assert row.get("mismatch/mean", 0) < 1e-5, "where the same weights wrote and read"
        assert ("async/policy_gap_mean" in row) == (row["async/staleness_max"] > 0)
    assert any(abs(row["correction/ratio"] - 1) > 1e-6 for row in jobs.train_rows(folder))


def test_every_sync_is_proven(folder):
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "sync/probe" in row]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert all(row["sync/probe"] < 1e-5 and row["sync/read_back"] == row["sync/tensors"] > 0 for row in rows)


def test_the_engine_works_while_the_policy_trains(folder):
    lines = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    training = [each for each in lines if each["who"] == "trainer"]
    generating = [each for each in lines if each["what"] == "generation"]
    assert [each["what"] for each in training] == ["make_experience", "ppo_train"] * STEPS
    assert any(one["begin"] < other["end"] and other["begin"] < one["end"] for one in training for other in generating)


SHARED = [
    *(word for word in WORDS if word != "train.async_enable=true"),
    *STREAM,
    "train.colocate_all=true",
    "vllm.enable_sleep=true",
    "ds.enable_sleep=true",
]


@pytest.mark.proof
def test_on_shared_devices_responses_are_continued_after_each_sync(runs, warm):
    folder = runs / "shared_devices"
    jobs.run(folder, [*SHARED, f"actor.model_name_or_path={warm}"])
    trained, mixed = [], 0
    for step, row in enumerate(jobs.train_rows(folder)):
        samples = jobs.rollout(folder, step + 1)
        trained += [sample["prompt_index"] for sample in samples if sample["sample"] == 0]
        for sample in samples:
            versions = [version for version in sample["weight_version"] if version >= 0]
            assert versions == sorted(versions) and step - 3 <= versions[0] and versions[-1] <= step
            mixed += versions[0] < versions[-1]
        assert row.get("mismatch/mean", 0) < 1e-5 and row["sync/probe"] < 1e-5
    assert len(trained) == len({*trained}) == 4 * STEPS
    assert mixed > 0
    lines = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    training = [each for each in lines if each["what"] == "ppo_train"]
    generating = [each for each in lines if each["what"] == "generation"]
    assert len(training) == STEPS and generating
    assert not any(
        one["begin"] < other["end"] and other["begin"] < one["end"] for one in training for other in generating
    )
