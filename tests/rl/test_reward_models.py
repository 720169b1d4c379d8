"""What a reward model and a process reward model say of a response, as its reward and its score."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.models.process_reward_model import StepScores
from rlhf_suite.rewards.base import RewardFailure, Sample, Scored
from rlhf_suite.rl.model_groups import RewardGroup
from rlhf_suite.rl.reward_models import RewardModelSource, outcome


class LastToken:
    """In place of the ranks of a reward model, two of them: the score of a sequence is its last token."""

    name = "reward"

    def __init__(self, ranks: int = 2) -> None:
        self.mesh = Mesh(ranks)

    def start_sharded(self, method, shards, *args):
        assert method == "scores"
        return [batch.ids[batch.starts + batch.lengths - 1].float() for batch in shards]

    def wait(self, refs, what):
        return refs


def answers(*last: int) -> list[Sample]:
    return [Sample("", "", "", "", "", ids=[1] * (number + 1) + [token]) for number, token in enumerate(last)]


@pytest.mark.notices(
    "a reward model's score is standardised too",
    "rl/reward_models.py",
    "[Scored(reward, score) for",
    "[Scored(reward, reward) for",
)
def test_the_score_is_the_models_and_the_reward_is_it_standardised():
    found = RewardModelSource(RewardGroup(LastToken()), (3.0, 2.0)).score(answers(3, 9, 1))
    assert [(each.reward, each.score) for each in found] == [(0, 3), (3, 9), (-1, 1)]


def test_without_constants_the_score_is_the_reward():
    found = RewardModelSource(RewardGroup(LastToken()), None).score(answers(3, 9, 1))
    assert [(each.reward, each.score) for each in found] == [(3, 3), (9, 9), (1, 1)]


@pytest.mark.parametrize(("aggregate", "reward"), [("min", 0.25), ("product", 0.125), ("last", 0.5), ("mean", 0.375)])
def test_the_steps_of_a_solution_become_its_reward(aggregate, reward):
    found = outcome(StepScores([0.25, 0.5]), aggregate, 64)
    assert isinstance(found, Scored)
    assert (found.reward, found.score) == pytest.approx((reward, reward))
    assert found.extra == pytest.approx({"step_min": 0.25, "step_mean": 0.375, "num_steps": 2.0})


@pytest.mark.notices(
    "a solution that does not fit is scored by the steps that do",
    "rl/reward_models.py",
    "if steps.truncated:",
    "if False:",
)
def test_a_solution_that_does_not_fit_has_no_reward():
    found = outcome(StepScores([0.9], truncated=True), "min", 64)
    assert isinstance(found, RewardFailure) and "64 tokens" in found.reason


def test_two_ranks_score_what_one_does_in_the_same_order():
    many = answers(*range(20, 60, 3))
    alone, pair = (RewardModelSource(RewardGroup(LastToken(ranks)), None).score(many) for ranks in (1, 2))
    assert alone == pair
    assert [each.reward for each in pair] == [*range(20, 60, 3)]


class LargestImage(LastToken):
    """The score of a sequence is the size of its largest image."""

    def start_sharded(self, method, shards, *args):
        return [torch.tensor([max(map(len, files), default=0) for files in batch.images]).float() for batch in shards]


@pytest.mark.notices(
    "the same words about other images get one score",
    "rl/reward_models.py",
    "np.int64)), *sample.images))",
    "np.int64)),))",
)
def test_the_same_words_about_other_images_are_scored_each():
    files = [(b"xx",), (), (b"x", b"xxx"), (b"xx",)]
    samples = [Sample("", "", "", "", "", ids=[1, 2], images=each) for each in files]
    found = RewardModelSource(RewardGroup(LargestImage()), None).score(samples)
    assert [each.score for each in found] == [2, 0, 3, 2]
