"""Runs of six steps whose rollouts are made ahead, and what they wrote."""

from __future__ import annotations

import math

import pyarrow.parquet as pq
from plain_run import small

from rlhf_suite.tracking.metrics import read_rows

STEPS = 6
FLAGS = {
    "train__num_episodes": 3,
    "ckpt__save_steps": 2,
    "ckpt__load_enable": True,
    "algo__advantage__is_correction_level": "token",
}


def ahead(depth: int, **more):
    return small(**FLAGS, **more, train__async_enable=True, train__async_queue_size=depth)


def rollout(folder, step):
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def steps(folder) -> list[dict]:
    return [row for row in read_rows(folder / "metrics.jsonl") if "train/reward" in row]


def assert_same_run(mine, theirs) -> None:
    for one, other in zip(steps(mine), steps(theirs), strict=True):
        for name, value in other.items():
            if not name.startswith(("time", "timing/", "perf/")):
                assert one[name] == value or (math.isnan(one[name]) and math.isnan(value)), (one["step"], name)
    for step in range(1, STEPS + 1):
        assert rollout(mine, step) == rollout(theirs, step)
    assert (mine / "model/model.safetensors").read_bytes() == (theirs / "model/model.safetensors").read_bytes()
