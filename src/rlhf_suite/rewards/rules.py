"""Rewards by rules: 1 for a right response, 0 for a wrong one.

A rule gets one row and returns its reward, or raises `LabelError` when the row's label makes no sense (a wrong label is
not a wrong response). A rule that imports much has a module of its own, which is loaded for that rule only.
"""

from __future__ import annotations

import re

from rlhf_suite.config.reward import RuleConfig
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import LabelError, Outcome, RewardFailure, Sample, Scored, ScoringFunction


@reward_rule(needs=("label",))
def exact_match(row: Sample, config: RuleConfig) -> float:
    """The response equals the label, apart from white space at both ends."""
    return float(row.response.strip() == row.label.strip())


@reward_rule(name="format", reads=("format_pattern",))
def formatted(row: Sample, config: RuleConfig) -> float:
    """The whole response matches reward.rules.format_pattern, apart from white space around it.

    A dot in the pattern matches the end of a line too.
    """
    return float(re.compile(config.format_pattern, re.DOTALL).fullmatch(row.response.strip()) is not None)


@reward_rule(reads=("length_limit",))
def length(row: Sample, config: RuleConfig) -> float:
    """1 up to reward.rules.length_limit characters, then falling by the share beyond it, to 0 at twice the limit."""
    return min(1.0, max(0.0, 2.0 - len(row.response) / config.length_limit))


def make_scorer(name: str, config: RuleConfig | None = None) -> ScoringFunction:
    """Return the rule `name`, of the suite or of a user's file, as a function of many rows."""
    rule, settings = reward_rule.load(name), config or RuleConfig()

    def outcome(row: Sample) -> Outcome:
        try:
            reward = rule(row, settings)
        except LabelError as error:
            return RewardFailure(str(error), "error")
        return reward if isinstance(reward, Scored) else Scored(float(reward), float(reward))

    return lambda rows: [outcome(row) for row in rows]
