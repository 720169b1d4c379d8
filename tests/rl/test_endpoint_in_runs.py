"""Whole runs in one process with a program that rewrites its history: synchronous, as a stream, and continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from plain_run import run, small

import forking_agent
from forking_agent import add_stops, write_program
from rlhf_suite.data.trajectory import MODEL
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.rl.sample_table import read_samples
from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.stack

FLAGS = {
    **{name.replace(".", "__"): value for name, value in forking_agent.FLAGS.items()},
    "reward__stop_properly_penalty_coef": None,
    "train__max_epochs": 2,
    "train__batch_size": 2,
    "algo__advantage__is_correction_level": "token",
    "ckpt__save_steps": 1,
    "ckpt__load_enable": True,
}
SAMPLES = {"synchronous": {}, "stream": {"train__async_enable": True, "train__partial_rollout_enable": True}}
SAMPLES["ahead"] = {"train__async_enable": True}


def settings(folder: Path, **more):
    """Return a run with this program, of a model that ends its turns with any of 55 tokens that no template has."""
    folder.mkdir(exist_ok=True)
    if not (folder / "start").exists():
        create_tiny(folder / "start")
        add_stops(folder / "start")
    program = write_program(folder)
    files = {"train__agent_func_path": program, "actor__model_name_or_path": f"{folder}/start"}
    return small(**files, **FLAGS, **more)


@pytest.fixture(scope="module")
def folders(ranks, tmp_path_factory):
    """The folder of a run of each kind, made when it is first asked for."""
    made = {}

    def folder(kind):
        if kind not in made:
            path = made[kind] = tmp_path_factory.mktemp(kind)
            ranks(1).call(run, path / "run", settings(path / "files", **SAMPLES[kind]))
        return made[kind] / "run"

    return folder


def rows_of(folder: Path, step: int) -> list[dict]:
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def episodes_of(folder: Path, step: int) -> list[list[dict]]:
    found: dict[tuple[int, int], list[dict]] = {}
    for row in rows_of(folder, step):
        found.setdefault((row["group"], row["sample"]), []).append(row)
    return [*found.values()]


@pytest.mark.parametrize("kind", SAMPLES)
def test_ledgers_of_an_episode_share_its_reward_and_its_advantage(folders, kind):
    folder = folders(kind)
    steps = [row for row in read_rows(folder / "metrics.jsonl") if "train/reward" in row]
    assert len(steps) == 2
    for number, metrics in enumerate(steps, start=1):
        episodes = episodes_of(folder, number)
        assert len(episodes) == metrics["rollout/num_samples"] == 4
        rewards = [episode[0]["reward"] for episode in episodes]
        assert metrics["train/reward"] == pytest.approx(np.mean(rewards))
        assert metrics["agent/ledgers"] == np.mean([len(episode) for episode in episodes]) > 1.5
        for place, episode in enumerate(episodes):
            assert [row["ledger"] for row in episode] == [*range(len(episode))]
            assert {row["reward"] for row in episode} == {rewards[place]}
            other = rewards[place ^ 1]  # of the other sample of the prompt
            for row in episode:
                own = np.array(row["owner"]) == MODEL
                if number == 1:  # the policy is the reference, so there is no penalty
                    assert np.array(row["advantages"])[own] == pytest.approx(rewards[place] - other, abs=1e-4)
                if kind == "synchronous":
                    gap = np.array(row["engine_log_probs"])[own] - np.array(row["old_log_probs"])[own]
                    assert own.any() and np.abs(gap).max() < 1e-4


def test_a_run_that_was_stopped_continues_with_the_same_numbers(ranks, folders, tmp_path):
    """Rollouts that are made ahead wait in the checkpoint, with their forks."""
    whole = folders("ahead")
    shutil.copytree(whole, tmp_path / "run")
    for later in (tmp_path / "run" / "checkpoints" / "step_000002", tmp_path / "run" / "model"):
        shutil.rmtree(later)
    ranks(1).call(run, tmp_path / "run", settings(whole.parent / "files", **SAMPLES["ahead"]))
    for mine, theirs in zip(rows_of(tmp_path / "run", 2), rows_of(whole, 2), strict=True):
        for name in ("ids", "owner", "engine_log_probs", "advantages", "reward", "ledger", "sample"):
            assert mine[name] == theirs[name], name


@pytest.mark.notices(
    "groups with forks that had ended are made again by a continued run",
    "rl/slots.py",
    'table.ready = {index: ready(index, version) for index, version in state["ready"]}',
    "table.ready = {}",
)
def test_a_stream_that_was_stopped_trains_on_the_forks_that_had_ended_as_they_were(ranks, tmp_path):
    """Each step is evaluated, so that the groups that began after the sync have ended when it is saved."""
    evaluated = {
        "eval__dataset": "builtin:reverse",
        "eval__max_samples": 2,
        "eval__n_samples_per_prompt": 2,
        "eval__steps": 1,
        "train__num_episodes": 2,
        "ckpt__max_num": 10,
    }
    words = settings(tmp_path / "files", **SAMPLES["stream"], **evaluated)
    run_folder, stopped = tmp_path / "run", 2
    ranks(1).call(run, run_folder, words)
    for later in (*(run_folder / "checkpoints").glob("step_*"), run_folder / "model"):
        if later.name == "model" or int(later.name[-6:]) > stopped:
            shutil.rmtree(later)
    samples = run_folder / "checkpoints" / f"step_{stopped:06d}" / "samples"
    state = json.loads((samples / "slots.json").read_text())
    assert state["ready"], "or this test looks at nothing"
    waiting = read_samples(samples).trajectories
    assert max(ledger.fork for ledger in waiting) > 0
    ranks(1).call(run, run_folder, words)
    rows = [row for step in range(1, 5) for row in rows_of(run_folder, step)]
    groups = [row["prompt_index"] for row in rows if row["sample"] == 0 and row["ledger"] == 0]
    assert sorted(groups) == sorted([*range(4)] * 2), "every prompt once an epoch"
    trained = [row for step in range(stopped + 1, 5) for row in rows_of(run_folder, step)]
    found = {(tuple(row["ids"]), row["ledger"]): row for row in trained}
    for ledger in waiting:
        row = found[tuple(ledger.ids.tolist()), ledger.fork]
        assert row["owner"] == ledger.owner.tolist() and row["sample"] == ledger.sample
        assert row["engine_log_probs"] == pytest.approx(ledger.engine_log_probs.tolist())
        assert row["weight_version"] == ledger.version.tolist()
