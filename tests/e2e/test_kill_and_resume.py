"""kill -9 at any instant, then the same command with ckpt.load_enable=true: as if nothing had happened.

`benchmarks/kills.py` kills every kind of run, several times each.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import tempfile
import time
from pathlib import Path

import jobs
import pyarrow.parquet as pq
import pytest

from rlhf_suite.cli import main
from rlhf_suite.tracking.metrics import is_measured, read_rows

STEPS = 5
KILLED_AFTER = 2
GONE_S = 15.0


@pytest.fixture(scope="module")
def temporary():
    """TMPDIR of the killed run; short, since sockets are below it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def resumed(runs, actor_critic_words, temporary):
    """A run that was killed, the processes that it had, and what it said of itself before it was continued."""
    folder, words = runs / "resumed", [*actor_critic_words, "ckpt.load_enable=true"]
    job = jobs.Job(folder, words)
    job.wait_for_step(KILLED_AFTER)
    # Before a checkpoint, while it is written, or in the next step: each takes a fraction of a second.
    instant = random.uniform(0, 0.6)
    time.sleep(instant)
    family = job.kill()
    print(f"killed {instant} s after step {KILLED_AFTER}")  # shown when a test fails
    assert len(family) > 5
    assert jobs.survivors(family, GONE_S) == []
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["why", str(folder)]) == 1
    jobs.run(folder, words)
    return folder, family, said.getvalue()


def test_the_killed_run_says_what_it_did_last(resumed):
    said = resumed[2]
    assert "is gone: it was killed" in said
    assert "when it was last seen it waited for" in said and "its main thread was at, the innermost call last\n" in said
    # A record is written every two seconds, so the last one may be of the steps or of the start of the engines.
    assert re.search(r"\n  \S+/rlhf_suite/\w+/\w+\.py:\d+ in \w+\n", said), said


@pytest.mark.parametrize("model", ["model", "model_critic", "model_ema"])
def test_the_final_weights_are_those_of_an_uninterrupted_run(actor_critic, resumed, model):
    assert jobs.digest(resumed[0], model) == jobs.digest(actor_critic, model)


def test_the_metrics_are_those_of_an_uninterrupted_run(actor_critic, resumed):
    rows = jobs.timeless(read_rows(actor_critic / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert jobs.timeless(read_rows(resumed[0] / "metrics.jsonl")) == rows


@pytest.mark.parametrize("kind", ["rollouts", "evaluations"])
def test_the_samples_are_those_of_an_uninterrupted_run(actor_critic, resumed, kind):
    files = sorted(path.name for path in (actor_critic / kind).glob("*.parquet"))
    assert sorted(path.name for path in (resumed[0] / kind).glob("*.parquet")) == files
    assert len(files) == {"rollouts": STEPS, "evaluations": 4}[kind]
    for name in files:
        assert pq.read_table(resumed[0] / kind / name).equals(pq.read_table(actor_critic / kind / name)), name


def test_the_kl_controller_went_on_from_its_checkpoint(actor_critic, resumed):
    """beta <- beta (1 + clip(KL / 0.02 - 1, -0.2, 0.2) x 16 samples / horizon 100), from 0.05."""
    beta = 0.05
    for row in jobs.train_rows(resumed[0]):
        assert row["train/kl_coef"] == pytest.approx(beta, rel=1e-6)
        beta *= 1 + min(max(row["train/kl"] / 0.02 - 1, -0.2), 0.2) * 16 / 100
    for folder in (actor_critic, resumed[0]):
        state = json.loads((folder / "checkpoints" / "step_000005" / "state.json").read_text())
        assert state["kl_controller"]["coef"] == pytest.approx(beta, rel=1e-6)
        assert state["step"] == STEPS
    assert beta != 0.05


@pytest.mark.notices(
    "a continued run forgets the coefficient of its entropy bonus",
    "rl/build.py",
    'controllers | {"entropy_controller": updater.entropy}',
    "controllers",
    limit_s=600,
)
def test_the_entropy_bonus_went_on_from_its_checkpoint(actor_critic, resumed):
    """No entropy over 261 tokens reaches 10 nats, so the coefficient grows by 0.005 in every step of the policy."""
    for folder in (actor_critic, resumed[0]):
        _, *rows = jobs.train_rows(folder)
        assert [row["train/entropy_coef"] for row in rows] == pytest.approx([0.0, 0.005, 0.01, 0.015])
        state = json.loads((folder / "checkpoints" / "step_000005" / "state.json").read_text())
        assert state["entropy_controller"]["coef"] == pytest.approx(0.02)


def test_the_policy_waited_for_its_critic_and_groups_for_their_step(actor_critic):
    """Step 1 trains the critic alone; samples of the first weights are still trained on when there are newer ones."""
    first, *others = jobs.train_rows(actor_critic)
    assert "train/policy_loss" not in first and "train/critic_loss" in first
    assert all("train/policy_loss" in row for row in others)
    assert max(row["rollout/waiting_groups"] for row in [first, *others]) > 0
    versions = [row["rollout/weight_version"] for row in [first, *others]]
    assert any(version < step for step, version in enumerate(versions)), versions
    for step in range(1, STEPS + 1):
        samples = jobs.rollout(actor_critic, step)
        assert len({row["group"] for row in samples}) == 4 and len(samples) == 16
        for group in range(4):
            assert 0 < sum(row["score"] for row in samples if row["group"] == group) < 4
        assert all(0 <= weight <= 2 for row in samples for weight in row["correction"])
    digests = {jobs.digest(actor_critic, name) for name in ("model", "model_ema")}
    assert len(digests) == 2


def test_three_checkpoints_and_no_debris_remain(resumed):
    kept = sorted(path.name for path in (resumed[0] / "checkpoints").iterdir() if path.name.startswith("step"))
    assert kept == ["step_000003", "step_000004", "step_000005"]
    assert not list(resumed[0].rglob("*.tmp"))


def test_the_status_is_that_of_an_uninterrupted_run(actor_critic, resumed):
    ours, theirs = (json.loads((folder / "status.json").read_text()) for folder in (resumed[0], actor_critic))
    assert (ours["state"], ours["last_step"]) == ("done", STEPS)
    assert ours["error"] == theirs["error"]
    metrics = ({k: v for k, v in status["metrics"].items() if not is_measured(k)} for status in (ours, theirs))
    assert next(metrics) == next(metrics)


def test_a_killed_run_leaves_neither_processes_nor_temporary_files_behind(resumed, temporary):
    assert jobs.survivors(resumed[1], GONE_S) == []
    assert [str(path) for path in temporary.iterdir()] == []
