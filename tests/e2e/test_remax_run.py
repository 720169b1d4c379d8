"""A run whose baselines are greedy responses, and whose rewards are shaped: what it trains on is what the flags say."""

from __future__ import annotations

import jobs
import numpy as np
import pytest

pytestmark = pytest.mark.proof
SAMPLES, LONGEST, BUFFER = 4, 16, 8
WORDS = [
    *jobs.SMALL,
    "algo.advantage.estimator=remax",
    "actor.policy_loss_type=reinforce",
    "actor.loss_agg_mode=seq-mean-token-sum-norm",
    "algo.kl.init_coef=0",
    "reward.overlong_buffer_len=8",
    "reward.stop_properly_penalty_coef=0.5",
    "train.batch_size=16",
    "train.max_steps=2",
    "eval.steps=-1",
]


@pytest.fixture(scope="module")
def remax(runs, warm):
    folder = runs / "remax"
    words = [word for word in WORDS if not word.startswith("eval.") or word == "eval.steps=-1"]
    jobs.run(folder, [*words, "eval.dataset=null", f"actor.model_name_or_path={warm}"])
    return folder


@pytest.mark.parametrize("step", [1, 2])
def test_greedy_responses_are_baselines_and_are_not_trained_on(remax, step):
    samples = jobs.rollout(remax, step)
    assert len(samples) == 4 * SAMPLES
    baselines = {}
    for row in samples:
        mask = np.array(row["mask"], bool)
        own = int(mask.sum())
        shaped = row["score"] - max(0, own - (LONGEST - BUFFER)) / BUFFER
        shaped *= 0.5 if row["finish_reason"] == "length" else 1
        assert row["reward"] == pytest.approx(shaped, abs=1e-6)
        advantages = np.array(row["advantages"])[mask]
        assert np.ptp(advantages) == 0, "without KL every token has the same"
        baselines.setdefault(row["group"], set()).add(round(row["reward"] - float(advantages[0]), 5))
    assert all(len(of_group) == 1 for of_group in baselines.values()), "one baseline for all samples of a prompt"
    assert len(baselines) == 4


def test_its_metrics_are_those_of_what_was_trained_on(remax):
    for step, row in enumerate(jobs.train_rows(remax), 1):
        samples = jobs.rollout(remax, step)
        assert row["train/reward"] == pytest.approx(np.mean([sample["reward"] for sample in samples]))
        assert row["train/score"] == pytest.approx(np.mean([sample["score"] for sample in samples]))
        assert row["mismatch/mean"] < 1e-5
        assert row["train/actor_grad_norm"] > 0 and "train/ppo_clip_ratio" not in row
