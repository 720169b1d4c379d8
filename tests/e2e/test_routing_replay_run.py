"""A run of PPO of a mixture of experts with routing replay: routes reach the update, checkpoints and files, through
partial rollouts, forks of an agent and a resume."""

from __future__ import annotations

import shutil

import jobs
import numpy as np
import pyarrow.parquet as pq
import pytest

import forking_agent
from families import make_typed
from forking_agent import add_stops, write_program
from rlhf_suite.data.trajectory import MODEL
from rlhf_suite.run_folders.run_folder import RunFolder, samples_file

pytestmark = pytest.mark.proof
FLAGS = [
    *jobs.SMALL,
    *("actor.routing_replay=true", "actor.gradient_checkpointing_enable=true", "algo.kl.init_coef=0.01"),
    *("train.max_steps=3", "ckpt.save_steps=1", "ds.packing_samples=true", "ds.param_dtype=fp32"),
]
STREAM = [
    *("train.async_enable=true", "train.partial_rollout_enable=true", "correction=tis"),
    *("train.async_queue_size=3", "train.async_run_ahead=2"),
    "vllm.max_num_seqs=4",  # so that some responses are unfinished whenever a batch is complete
]
AGENT = [
    *(f"{name}={'null' if value is None else value}" for name, value in forking_agent.FLAGS.items()),
    *("algo.advantage.estimator=rloo", "eval.dataset=null", "eval.steps=-1"),
]


@pytest.fixture(scope="module")
def words(runs):
    make_typed(runs / "experts", "qwen3_moe", head_dim=32)
    return [*FLAGS, f"actor.model_name_or_path={runs / 'experts'}"]


@pytest.fixture(scope="module")
def routed(runs, words):
    jobs.run(runs / "routed", words)
    return runs / "routed"


def check_routes(folder, step):
    """Assert that every token but the last one of a ledger has its route."""
    table = pq.read_table(samples_file(RunFolder(folder).rollouts, step), columns=["routes", "owner"])
    for row in table.to_pylist():
        given = np.array(row["routes"])
        assert given.shape == (len(row["owner"]), 4, 2)
        assert (given[:-1] >= 0).all() and (given[-1] == -1).all()


def test_every_token_that_is_trained_on_has_its_route(routed):
    for step in (1, 2, 3):
        check_routes(routed, step)
    rows = jobs.train_rows(routed)
    assert all(row["mismatch/mean"] < 1e-6 for row in rows)
    assert all(row["train/rerouted"] < 1e-2 for row in rows)


def test_a_resumed_run_ends_with_the_same_weights(runs, routed, words):
    folder = shutil.copytree(routed, runs / "resumed_routes")
    newest = max((folder / "checkpoints").iterdir())
    shutil.rmtree(newest)
    jobs.run(folder, [*words, "ckpt.load_enable=true"])
    assert jobs.digest(folder, "model") == jobs.digest(routed, "model")


def test_a_replay_ends_with_the_same_weights(runs, routed):
    folder = runs / "replayed_routes"
    jobs.run(folder, [f"--config={routed / 'config.yaml'}", f"rollout.replay={routed}"])
    assert jobs.digest(folder, "model") == jobs.digest(routed, "model")


def test_responses_of_several_weights_have_all_their_routes(runs, words):
    folder, mixed = runs / "routes_of_a_stream", 0
    jobs.run(folder, [*words, *STREAM])
    for step in (1, 2, 3):
        check_routes(folder, step)
        for sample in jobs.rollout(folder, step):
            mixed += len({version for version in sample["weight_version"] if version >= 0}) > 1
    assert mixed, "no response was written by several weights"


@pytest.mark.parametrize("schedule", [[], STREAM], ids=["with the step", "stream"])
def test_each_ledger_of_an_agent_that_forks_has_its_routes(runs, words, schedule):
    """Tokens of the prompt that a fork shares with the ledger before have routes too, and the policy reads all."""
    home = runs / f"forks_{len(schedule)}"
    shutil.copytree(runs / "experts", home / "model")
    add_stops(home / "model")
    own = [f"train.agent_func_path={write_program(home)}", f"actor.model_name_or_path={home / 'model'}"]
    no_evaluation = [word for word in words if not word.startswith("eval.")]
    jobs.run(home / "run", [*no_evaluation, *AGENT, *own, *schedule])
    forks = 0
    for step in (1, 2, 3):
        table = pq.read_table(
            samples_file(RunFolder(home / "run").rollouts, step), columns=["routes", "owner", "ledger"]
        )
        for row in table.to_pylist():
            given, last = np.array(row["routes"]), max(np.flatnonzero(np.array(row["owner"]) == MODEL))
            assert given.shape == (len(row["owner"]), 4, 2) and (given[:last] >= 0).all()
            forks += row["ledger"] > 0
    assert forks > 8
    rows = jobs.train_rows(home / "run")
    assert all(row.get("mismatch/mean", 0) < 1e-6 for row in rows), "where the same weights wrote and read"
    assert schedule or all(row["train/rerouted"] < 1e-2 for row in rows), "later weights route otherwise"
