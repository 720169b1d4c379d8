"""A run of PPO of a mixture of experts with routing replay: routes reach the update, checkpoints and files, through
partial rollouts and a resume."""

from __future__ import annotations

import shutil

import jobs
import numpy as np
import pyarrow.parquet as pq
import pytest

from families import make_typed
from rlhf_suite.tracking.run_folder import RunFolder, samples_file

pytestmark = pytest.mark.proof
FLAGS = [
    *jobs.SMALL,
    *("actor.routing_replay=true", "actor.gradient_checkpointing_enable=true", "algo.kl.init_coef=0.01"),
    *("train.max_steps=3", "ckpt.save_steps=1", "ds.packing_samples=true", "ds.param_dtype=fp32"),
]
STREAM = ["train.async_enable=true", "train.partial_rollout_enable=true", "correction=tis"]


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
    print([(row["mismatch/mean"], row["train/rerouted"]) for row in rows])
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
    folder = runs / "routes_of_a_stream"
    jobs.run(folder, [*words, *STREAM])
    for step in (1, 2, 3):
        check_routes(folder, step)
