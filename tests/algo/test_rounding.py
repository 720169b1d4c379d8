"""Rewards that differ by the rounding of float32 alone are equal to everything that divides by a deviation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from given import prompt
from rlhf_suite.algo.advantage import CreditInput, assign_credit, whiten
from rlhf_suite.algo.scores import are_equal, normalize_scores, standardize, teaches
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig, KLConfig
from rlhf_suite.data.trajectory import Trajectory, to_batch
from rlhf_suite.rewards.base import Sample
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.reward_models import RewardModelSource
from rlhf_suite.rl.scoring import environment_outcome

DIVIDING = ["group_norm", "reinforce_baseline"]
WAYS = ([1.0], [0.3, 0.7], [0.1, 0.2, 0.7], [0.7, 0.2, 0.1], [100.0, -99.9, 0.9], [1e-3] * 10 + [0.99])


def episode(turns: list[float], sample: int) -> Trajectory:
    """An episode that earns by turns; the last one's reward is that of its end."""
    ledger = Trajectory.start(prompt(), 0, sample)
    for number, reward in enumerate(turns):
        if number:
            ledger.append_environment([3])
        ledger.append_model(np.array([7, 8]), np.array([-1.0, -1.0], np.float32), 0)
        if number < len(turns) - 1:
            ledger.reward_turn(reward)
    ledger.reward = turns[-1]
    return ledger


def advantages(estimator: str, ways: list[list[float]], scale: float) -> torch.Tensor:
    """The advantages of the tokens of one group whose episodes earn by the given turns."""
    ledgers = [episode([scale * reward for reward in turns], sample) for sample, turns in enumerate(ways)]
    totals = torch.tensor([environment_outcome([ledger]).reward for ledger in ledgers], dtype=torch.float32)
    config = AlgoConfig.of("ppo", advantage=AdvantageConfig(estimator=estimator), kl=KLConfig(init_coef=0.0))
    batch, _ = CreditAssigner(config).assign(replace(to_batch(ledgers), reward=totals))
    return batch.advantages


@pytest.mark.notices(
    "baselines do not know rewards of turns", "algo/advantage.py", "return inputs.totals\n", "return inputs.rewards\n"
)
@pytest.mark.notices(
    "rounding inside a group is a difference",
    "algo/advantage.py",
    "spread <= ROUNDING * largest",
    "spread < 0 * largest",
)
@pytest.mark.notices(
    "whole rewards are those without the turns",
    "rl/credit.py",
    "            totals=rewards,\n",
    "                totals=rewards if turns is None else besides_turns(rewards, turns, batch),\n",
)
@pytest.mark.notices(
    "of the rewards of turns only a first token counts",
    "rl/scoring.py",
    "for ledger in ledgers for reward in ledger.turn_rewards.tolist()",
    "for ledger in ledgers for reward in ledger.turn_rewards.tolist()[:1]",
)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
@pytest.mark.parametrize("estimator", DIVIDING)
def test_equal_totals_by_other_turns_teach_nothing(estimator, scale):
    draw = np.random.default_rng(0)
    for _ in range(60):
        ways = [WAYS[place] for place in draw.integers(0, len(WAYS), draw.integers(2, 17))]
        assert float(advantages(estimator, ways, scale).abs().max()) == 0, ways


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
def test_a_real_difference_still_has_a_deviation_of_one(scale):
    found = advantages("group_norm", [[1.0], [0.3, 0.701], [1.0], [1.0]], scale)
    assert float(found.max()) == pytest.approx(1.5, rel=0.05)


@pytest.mark.notices(
    "whitening blows rounding up",
    "algo/advantage.py",
    "centred.abs().max() <= ROUNDING",
    "centred.abs().max() < 0 * ROUNDING",
)
def test_whitening_does_not_blow_rounding_up():
    noisy = 1e4 * (1 + 1e-7 * torch.randn(50, generator=torch.Generator().manual_seed(0)))
    assert float(whiten(noisy, False).abs().max()) == 0
    assert float(whiten(noisy + torch.arange(50), False).std()) == pytest.approx(1.0, rel=0.02)


def test_an_estimator_of_ones_own_may_leave_the_totals_out():
    rewards = torch.tensor([1.0, 0.5])
    given = CreditInput(rewards, torch.zeros(4), torch.tensor([2, 2]), torch.tensor([0, 0]))
    found = assign_credit(
        replace(given, turn_rewards=torch.tensor([0.0, 0.0, 0.5, 0.0])), AdvantageConfig("group_norm")
    )
    assert float(found.advantages.abs().max()) == 0


@pytest.mark.notices(
    "scores are equal only bit for bit",
    "algo/scores.py",
    "<= ROUNDING * max(map(abs, scores))",
    "<= 0 * max(map(abs, scores))",
)
def test_scores_that_differ_by_rounding_are_equal_at_any_scale():
    for scale in (1e-5, 1.0, 1e6):
        near, far = [scale, scale * (1 + 1e-7)], [scale, scale * 1.001]
        assert are_equal(near) and not are_equal(far)
        assert standardize(near) == [0, 0] and standardize(far)[1] == pytest.approx(2**-0.5)
        assert not teaches(near, -1e9, 1e9, 0.0) and teaches(far, -1e9, 1e9, 0.0)
    assert abs(float(normalize_scores(torch.tensor([100.00001]), 100.0, 0.0))) < 1


class Asked:
    """In place of the group of a reward model: a score that depends on the place in the batch."""

    def scores(self, batch):
        self.asked = len(batch.tokens)
        return self

    def result(self):
        return torch.arange(self.asked) * 1e-5 + 1


@pytest.mark.notices(
    "a model scores equal texts each by itself",
    "rl/reward_models.py",
    "known.setdefault(key(sample),",
    "known.setdefault(len(known),",
)
def test_a_model_scores_equal_texts_once():
    """In other batches a model gives the same text another score, by rounding."""
    samples = [Sample("", "", "", "", "", {}, np.array(ids)) for ids in ([1, 2], [3], [1, 2], [3], [4])]
    found = [each.reward for each in RewardModelSource(Asked(), None).score(samples)]
    assert found[0] == found[2] and found[1] == found[3] and len({*found}) == 3
