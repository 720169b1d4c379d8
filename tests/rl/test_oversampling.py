"""Rounds of sampling with more prompts than a step trains on, without a filter, in runs of every schedule."""

from __future__ import annotations

import shutil
from itertools import chain

import pyarrow.parquet as pq
import pytest
from plain_run import run, small

from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.stack

STEPS = 6
FLAGS = {
    "train__num_episodes": 3,
    "ckpt__save_steps": 1,
    "ckpt__max_num": STEPS,
    "ckpt__load_enable": True,
    "algo__advantage__is_correction_level": "token",
}
AHEAD = {"train__async_enable": True, "train__async_queue_size": 2}
STREAM = AHEAD | {"train__partial_rollout_enable": True}
MORE = {"rollout__vllm_generate_batch_size": 4}  # two steps of two prompts; an epoch has four


def rollout(folder, step) -> list[dict]:
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def prompts(folder) -> list[list[int]]:
    """Return the prompts of each step."""
    return [[s["prompt_index"] for s in rollout(folder, step) if s["sample"] == 0] for step in range(1, STEPS + 1)]


def versions(folder) -> list[set[int]]:
    """Return the versions of the weights that wrote each step."""
    return [{v for s in rollout(folder, step) for v in s["weight_version"] if v >= 0} for step in range(1, STEPS + 1)]


def numbers(folder) -> list[dict]:
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "train/reward" in row]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "timing/", "perf/"))} for row in rows]


@pytest.fixture(scope="module")
def folders(ranks, tmp_path_factory):
    """The folder of a run with these flags, made when it is first asked for."""
    made = {}

    def folder(**more):
        key = tuple(more.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("run")
            ranks(1).call(run, made[key], small(**FLAGS | more))
        return made[key]

    return folder


@pytest.mark.parametrize(("more", "written"), [({}, [0, 0, 2, 2, 4, 4]), (AHEAD, [0, 0, 1, 1, 3, 3])])
def test_a_round_serves_two_steps_which_have_the_prompts_that_they_have_anyway(folders, more, written):
    folder, plain = folders(**more, **MORE), folders()
    assert prompts(folder) == prompts(plain)
    assert versions(folder) == [{version} for version in written]
    rows = numbers(folder)
    assert [row["rollout/waiting_groups"] for row in rows] == [2, 0] * 3
    assert [row["async/staleness_max"] for row in rows] == [step - version for step, version in enumerate(written)]
    assert rollout(folder, 1) == rollout(plain, 1), "the same samples, by the same weights"
    assert "rollout/waiting_groups" not in numbers(plain)[0]


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, AHEAD])
def test_a_run_that_was_stopped_continues_with_the_groups_that_waited(ranks, folders, tmp_path, more, step):
    whole, again = folders(**more, **MORE), tmp_path / "again"
    shutil.copytree(whole, again)
    stopped(again, step)
    ranks(1).call(run, again, small(**FLAGS | more | MORE))
    assert numbers(again) == numbers(whole)
    assert [rollout(again, k) for k in range(1, STEPS + 1)] == [rollout(whole, k) for k in range(1, STEPS + 1)]
    assert (again / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()


def stopped(folder, step) -> None:
    """Remove what a run wrote after a step."""
    shutil.rmtree(folder / "model")
    for later in (folder / "checkpoints").glob("step_*"):
        if later.name > f"step_{step:06d}":
            shutil.rmtree(later)


@pytest.mark.notices(
    "a stream does not read the prompts of a round",
    "rl/build.py",
    "round_size(rollout) - rollout.batch_size",
    "0",
)
def test_a_stream_keeps_more_groups_under_way_and_its_bound(ranks, folders, tmp_path):
    folder = folders(**STREAM, **MORE)
    stopped(shutil.copytree(folder, tmp_path / "again"), 2)
    ranks(1).call(run, tmp_path / "again", small(**FLAGS | STREAM | MORE))
    for made in (folder, tmp_path / "again"):
        assert sorted(chain.from_iterable(prompts(made))) == sorted([*range(4)] * 3), "each prompt once an epoch"
        assert all(min(each) >= step - 2 for step, each in enumerate(versions(made)))
        assert numbers(made)[0]["async/outstanding"] == 4
    assert numbers(folders(**STREAM))[0]["async/outstanding"] == 2
