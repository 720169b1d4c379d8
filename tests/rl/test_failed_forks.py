"""An episode of several ledgers whose environment failed."""

from __future__ import annotations

import pytest

from given import prompt
from rlhf_suite.config.declarations.agent import AgentConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.rewards.base import RewardFailure, Scored
from rlhf_suite.rl.scoring import Scorer


@pytest.mark.notices(
    "an episode that failed keeps the turn rewards of its other ledgers",
    "rl/scoring.py",
    "        for ledger in ledgers:\n            ledger.turn_rewards[:] = 0",
    "        for ledger in ledgers[-1:]:\n            ledger.turn_rewards[:] = 0",
)
def test_a_reward_of_zero_is_that_of_all_ledgers_of_the_episode():
    ledgers = [Trajectory.start(prompt(), 0, 0) for _ in range(2)]
    for number, ledger in enumerate(ledgers):
        ledger.fork, ledger.turn_rewards[-1] = number, 0.5
    ledgers[-1].failure = "no luck"
    scorer = Scorer(RewardConfig.of("generate"), None, None, None, AgentConfig(on_error="zero"))
    assert scorer.score_failure(RewardFailure("no luck", "error"), ledgers) == Scored(0.0, 0.0)
    assert not any(ledger.turn_rewards.any() for ledger in ledgers)
