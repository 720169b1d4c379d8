"""What must be equal in two runs that differ only in where they run, and in what portions."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import jobs
import numpy as np
import pytest

SAME = (
    *("train/reward", "train/score", "train/return", "train/response_length", "train/kl", "train/policy_loss"),
    *("train/ppo_kl", "train/ppo_clip_ratio", "train/actor_lr", "rollout/num_samples", "rollout/weight_version"),
    *("train/critic_loss", "train/values", "train/kl_coef", "train/critic_lr"),
)


def check_same_numbers(folder: Path, plain: Path, steps: Collection[int]) -> None:
    """Compare samples, rewards, log-probs and metrics of some steps of a run with those of a plain one; a policy that
    waits for its critic, and a run without a critic, have fewer metrics."""
    for step in steps:
        ours, theirs = jobs.rollout(folder, step), jobs.rollout(plain, step)
        for field in ("ids", "owner", "reward", "group", "sample", "finish_reason"):
            assert [row[field] for row in ours] == [row[field] for row in theirs], (step, field)
        for field in ("old_log_probs", "ref_log_probs", "engine_log_probs", "advantages"):
            difference = np.abs(jobs.column(ours, field) - jobs.column(theirs, field)).max()
            assert difference < 1e-4, (step, field, difference)
    rows, others = ({row["step"]: row for row in jobs.train_rows(path)} for path in (folder, plain))
    assert rows.keys() == others.keys()
    for step in steps:
        row, other = rows[step], others[step]
        wanted = {*SAME} & other.keys()
        assert {k: row[k] for k in wanted} == pytest.approx({k: other[k] for k in wanted}, rel=1e-5, abs=1e-5), step
        if "train/actor_grad_norm" in other:
            assert row["train/actor_grad_norm"] == pytest.approx(other["train/actor_grad_norm"], rel=1e-4)
        assert ("mismatch/mean" in row) == ("mismatch/mean" in other)  # only where some samples are new
        assert row.get("mismatch/mean", 0.0) < 1e-6
        assert row["sync/read_back"] == row["sync/tensors"]
        assert row["sync/probe"] < 3e-6  # of every token, prompts too: the unlikely ones have larger errors
