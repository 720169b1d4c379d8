"""An estimator reads numbers that rewards and agents give to samples: one file of the user's has both."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from plain_run import run, small

from given import prompt
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig, KLConfig
from rlhf_suite.config.rules.check_run import check
from rlhf_suite.data.trajectory import Experience, Trajectory, to_batch
from rlhf_suite.errors import UserError
from rlhf_suite.rl.credit import CreditAssigner

pytestmark = pytest.mark.stack

OWN = """
from rlhf_suite.algo.advantage import Credit, compute_reward_to_go
from rlhf_suite.registry import estimator


def reward_func(queries, prompts, labels):
    confidence = [sum(map(ord, each)) % 7 - 3.0 for each in queries]
    return {"rewards": [1.0] * len(queries), "extra_logs": {"confidence": confidence}}


@estimator(needs=("rewards", "number:confidence"))
def sure(inputs, config):
    credit = compute_reward_to_go(inputs, inputs.rewards * inputs.numbers["confidence"])
    return Credit(credit, credit)


@estimator(needs=("rewards",))
def silent(inputs, config):
    return Credit(inputs.numbers["confidence"], inputs.kl_penalty)


@estimator(needs=("rewards", "number:agent/turns"))
def by_turns(inputs, config):
    return Credit(inputs.kl_penalty, inputs.kl_penalty)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_a_run_with_an_estimator_of_a_new_number_needs_one_file(ranks, own, tmp_path):
    flags = {
        "algo__advantage__estimator": f"{own}:sure",
        "algo__kl__init_coef": 0.0,
        "reward__rule": None,
        "reward__remote_url": str(own),
        "reward__stop_properly_penalty_coef": None,
    }
    ranks(1).call(run, tmp_path, small(**flags))
    rows = [row for file in (tmp_path / "rollouts").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert len({row["reward/confidence"] for row in rows}) > 1
    for row in rows:
        advantages = np.array(row["advantages"])[np.array(row["mask"]) > 0]
        assert advantages.tolist() == [row["reward/confidence"]] * len(advantages)


def assigner(own, function: str) -> CreditAssigner:
    return CreditAssigner(
        AlgoConfig.of("ppo", advantage=AdvantageConfig(estimator=f"{own}:{function}"), kl=KLConfig(init_coef=0.0))
    )


def batch() -> Experience:
    made = [Trajectory.start(prompt(), 0, sample) for sample in range(2)]
    for one in made:
        one.append_model(np.array([5, 6]), np.zeros(2, np.float32), 0)
    return replace(to_batch(made), reward=torch.ones(2))


def test_a_sample_without_the_number_has_nan(own):
    one = assigner(own, "sure")
    found, _ = one.assign(batch(), [{"confidence": 0.5}, {"other": 1.0}])
    assert found.advantages[found.mask > 0][:2].tolist() == [0.5, 0.5]
    assert all(map(math.isnan, found.advantages[found.mask > 0][2:].tolist()))
    one.assign(batch(), [{}, {}])  # what samples had before may be missing in a later rollout


def test_a_number_that_no_sample_has_is_one_sentence(own):
    with pytest.raises(UserError) as raised:
        assigner(own, "sure").assign(batch(), [{"length": 2.0}, {"agent/turns": 1.0}])
    said = str(raised.value)
    assert "needs the number 'confidence' of samples, and no sample has it" in said
    assert "They have agent/turns, length:" in said and "\n" not in said


def test_an_estimator_cannot_read_a_number_that_it_does_not_declare(own):
    with pytest.raises(UserError, match=r'needs=\("number:confidence",\)'):
        assigner(own, "silent").assign(batch(), [{"confidence": 0.5}] * 2)


@pytest.mark.parametrize(
    ("function", "flags", "said"),
    [
        ("by_turns", {}, "an agent gives it, and the run has none"),
        ("by_turns", {"agent__kind": "tools"}, None),
        ("sure", {}, None),
        ("sure", {"reward__rule": None, "reward__model_name_or_path": "judge"}, "nothing in the run gives it"),
    ],
)
def test_a_number_that_nobody_can_give_is_refused_before_the_run(own, function, flags, said):
    config = small(algo__advantage__estimator=f"{own}:{function}", **flags)
    found = [str(each) for each in check(config, ()) if "needs the number" in str(each)]
    assert len(found) == (said is not None) and all(said in each for each in found), json.dumps(found)
