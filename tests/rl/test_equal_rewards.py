"""Rewards that tell no answers apart for several steps are said once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from given import prompt
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.rl.rollout import EQUAL_STEPS, EqualRewards
from rlhf_suite.rl.samples import ScoredTrajectories


def step(*groups: list[float]) -> ScoredTrajectories:
    """The rewards of the answers to each prompt."""
    flat = [(number, reward) for number, rewards in enumerate(groups) for reward in rewards]
    trajectories = [Trajectory.start(prompt(number), number, 0) for number, _ in flat]
    values, texts = np.array([reward for _, reward in flat], np.float32), [""] * len(flat)
    return ScoredTrajectories(trajectories, values, values, texts, texts)


@pytest.fixture
def watch():
    """What is said of the given steps under an estimator."""

    def make(estimator: str, steps: list[ScoredTrajectories], **flags) -> list[str]:
        said: list[str] = []
        rewards = EqualRewards(
            AlgoConfig.of("ppo", advantage=AdvantageConfig(estimator=estimator, **flags)), said.append
        )
        for each in steps:
            rewards.observe(each)
        return said

    return make


SAME, DIFFERENT = step([0, 0], [1, 1]), step([0, 1], [1, 1])


def test_groups_without_a_spread_are_said_once(watch):
    (said,) = watch("group_norm", [SAME] * (3 * EQUAL_STEPS))
    assert (
        f"In each of the last {EQUAL_STEPS} steps all answers to the same prompt had the same reward (mean 0.5)" in said
    )
    assert "data.label_key" in said


def test_one_step_with_a_difference_begins_anew(watch):
    steps = [SAME] * (EQUAL_STEPS - 1)
    assert watch("group_norm", [*steps, DIFFERENT, *steps]) == []


def test_other_estimators_compare_all_answers(watch):
    assert watch("gae", [SAME] * EQUAL_STEPS) == []
    (said,) = watch("gae", [step([1, 1], [1, 1])] * EQUAL_STEPS)
    assert "all answers had the same reward" in said


@pytest.mark.notices(
    "an estimator of reward parts is told of equal totals",
    "rl/rollout.py",
    "for part in parts or [scored.rewards]",
    "for part in [scored.rewards]",
)
def test_an_estimator_of_reward_parts_compares_the_parts(watch):
    flags = {"reward_parts": ["answer", "format"]}
    varied = replace(step([1, 1]), extra=[{"answer": 1.0, "format": 0.0}, {"answer": 0.0, "format": 1.0}])
    assert watch("gdpo", [varied] * EQUAL_STEPS, **flags) == []
    same = replace(step([1, 1]), extra=[{"answer": 1.0, "format": 0.0}] * 2)
    assert len(watch("gdpo", [same] * EQUAL_STEPS, **flags)) == 1
