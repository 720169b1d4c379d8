"""The maker of rewards in processes."""

from __future__ import annotations

import textwrap

import pytest

from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.rewards.reward_process import IsolatedScorer


@pytest.fixture
def rewarder(tmp_path):
    """A maker of rewarders from the source of a file or the name of a rule; they are closed in the end."""
    made = []

    def make(code: str | None = None, rule: str | None = None, timeout_s: float = 20.0) -> IsolatedScorer:
        config = RewardConfig.of("generate", rule=rule, timeout_s=timeout_s)
        if code is not None:
            path = tmp_path / f"rewards{len(made)}.py"
            path.write_text(textwrap.dedent(code))
            config.remote_url = str(path)
        made.append(IsolatedScorer(config, tmp_path / "reward.log"))
        return made[-1]

    yield make
    for one in made:
        one.close()
