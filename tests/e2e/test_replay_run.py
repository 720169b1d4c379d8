"""The rollouts of a run, trained on again without engines: the same flags give the same weights."""

from __future__ import annotations

import jobs
import pytest


@pytest.fixture(scope="module")
def replayed(runs, actor_critic):
    """A run with the flags of another one, and its rollouts."""
    folder = runs / "replayed"
    jobs.run(folder, [f"--config={actor_critic / 'config.yaml'}", f"rollout.replay={actor_critic}"])
    return folder


@pytest.mark.parametrize("model", ["model", "model_critic", "model_ema"])
def test_a_replay_ends_with_the_weights_of_the_run(actor_critic, replayed, model):
    assert jobs.digest(replayed, model) == jobs.digest(actor_critic, model)


def test_a_replay_measures_what_the_run_measured(actor_critic, replayed):
    """All that is not about engines, sources of rewards, time and rounds of sampling."""
    ours, theirs = (trained(folder) for folder in (replayed, actor_critic))
    assert len(ours) == 5
    assert ours == theirs


def trained(folder):
    """The metrics of training in each step."""
    kept = ("step", "train/", "mismatch/", "correction/")
    return [{name: row[name] for name in row if name.startswith(kept)} for row in jobs.train_rows(folder)]


def test_a_replay_starts_no_engine(replayed):
    assert sorted(path.name for path in (replayed / "logs").glob("*.log")) == [
        "actor-0.log",
        "critic-0.log",
        "ref-0.log",
    ]
    assert not list((replayed / "evaluations").glob("*"))


@pytest.mark.proof
def test_a_replay_may_learn_otherwise(runs, baseline):
    """With another estimator and rate the policy moves away from that which wrote the tokens, and this is measured."""
    folder = runs / "replayed_otherwise"
    words = ["algo.advantage.estimator=rloo", "actor.adam.lr=1e-2", "correction=tis", "run_dir=null"]
    jobs.run(folder, [f"--config={baseline / 'config.yaml'}", f"rollout.replay={baseline}", *words])
    first, *_, last = jobs.train_rows(folder)
    assert first["mismatch/mean"] < 1e-5 and last["mismatch/mean"] > 1e-2
    assert jobs.digest(folder, "model") != jobs.digest(baseline, "model")
