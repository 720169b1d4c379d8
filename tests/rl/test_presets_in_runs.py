"""Every `experiment=` composes with a model of the user's own and trains: a step in one process, with the numbers that
its algorithm is known by."""

from __future__ import annotations

import math
import shlex

import pytest
from plain_run import run

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.presets import preset_names
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.stack

LINE = (
    "task=ppo actor.model_name_or_path=builtin:tiny data.prompt_dataset=builtin:reverse data.label_key=label "
    "data.max_samples=8 data.max_len=64 data.cache_enable=false reward.rule=length reward.rules.length_limit=4 "
    "rollout.batch_size=2 rollout.max_new_tokens=5 rollout.micro_batch_size=4 train.batch_size=8 "
    "train.micro_batch_size=4 train.max_steps=1 actor.adam.lr=1e-3 ds.param_dtype=fp32 ds.zero_stage=0 "
    "launch.device=cpu logger.progress=false"
)
METRICS = {
    "clip_cov": {"train/covariance", "train/chosen_token_ratio", "train/ppo_clip_ratio"},
    "kl_cov": {"train/covariance", "train/chosen_token_ratio"},
    "dppo": {"train/ppo_clip_ratio_low", "train/ppo_clip_ratio_high"},
    "flash_reinforce": {"correction/masked", "correction/ratio"},
    "ppo": {"train/critic_loss"},
    "grpo": {"train/kl_loss"},
}
SINGLE = dict.fromkeys(("flash_reinforce", "ppo", "reinforce", "remax"), "rollout.batch_size=8")  # samples per prompt
TAUGHT = {"on_policy_distill"}  # by a teacher: tests/e2e/test_on_policy_distillation.py


@pytest.mark.parametrize("experiment", [name for name in preset_names("experiment") if name not in TAUGHT])
def test_a_preset_trains(ranks, tmp_path, experiment):
    found = preflight(parse(shlex.split(f"{LINE} experiment={experiment} {SINGLE.get(experiment, '')}")))
    assert not found.problems, found.problems
    ranks(1).call(run, tmp_path, found.runs[0])
    (row,) = [row for row in read_rows(tmp_path / "metrics.jsonl") if "train/reward" in row]
    assert math.isfinite(row["train/policy_loss"]) and math.isfinite(row["train/actor_grad_norm"])
    assert METRICS.get(experiment, set()) <= row.keys()
