"""Prompts that say how good their answer is: what conditional supervised tuning learns from (reward-conditioned SFT).

The model learns what answers of every reward look like; asked for a high one, it gives a better answer than the mean of
its data (as in Decision Transformer, Chen et al. 2021, and SteerLM, Dong et al. 2023).
"""

from __future__ import annotations

from rlhf_suite.config.reward_text import says_reward, with_reward
from rlhf_suite.data.messages import Message
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.errors import UserError


class RewardText:
    """Writes a reward into prompts as `data.reward_template` says; null leaves them as they are."""

    def __init__(self, template: str) -> None:
        if not says_reward(template):
            raise UserError(
                f"data.reward_template={template!r} must have {{prompt}} once and {{reward}}, e.g. "
                "'{prompt} <rm_score>: {reward:.2f} '; double other braces"
            )
        self.template = template

    def prompt(self, text: str, reward: float | None) -> str:
        """A prompt of text."""
        return text if reward is None else with_reward(self.template, text, reward)

    def messages(self, messages: list[Message], reward: float | None, row: Row) -> list[Message]:
        """A conversation: its last user message carries the reward."""
        if reward is None:
            return messages
        place = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
        if place is None or not isinstance(text := messages[place]["content"], str):
            raise RowError(row.where, "the prompt has no user message of text that could carry the reward")
        carrier = {**messages[place], "content": self.prompt(text, reward)}
        return [*messages[:place], carrier, *messages[place + 1 :]]
