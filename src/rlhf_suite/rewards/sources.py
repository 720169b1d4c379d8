"""Opens what `reward` names for text: a rule, a user's file, or HTTP servers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rlhf_suite.config.reward import RewardConfig, is_http, urls
from rlhf_suite.rewards.base import Outcome, RewardRow
from rlhf_suite.rewards.pool import Rewarder
from rlhf_suite.rewards.remote import RemoteReward


class TextReward(Protocol):
    """Scores text. `close` ends what it started."""

    def score(self, rows: list[RewardRow]) -> list[Outcome]:
        """One outcome per row, in their order."""
        ...

    def close(self) -> None: ...


def open_reward(config: RewardConfig, log: Path) -> TextReward:
    """The source of `config`. What reward code prints goes to `log`.

    Raises:
        UserError: it cannot be used.
    """
    if is_http(config.remote_url):
        return RemoteReward(urls(config.remote_url), config.http)
    return Rewarder(config, log)
