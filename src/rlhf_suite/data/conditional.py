"""Prompts that say how good their answer is: what conditional supervised tuning learns from (reward-conditioned SFT).

The model learns what answers of every reward look like; asked for a high one, it gives a better answer than the mean of
its data (as in Decision Transformer, Chen et al. 2021, and SteerLM, Dong et al. 2023).
"""

from __future__ import annotations

from rlhf_suite.config.data import SFTDataConfig
from rlhf_suite.data.render import Message
from rlhf_suite.data.row import Row, RowError, number
from rlhf_suite.errors import UserError


def conditioned(prompt: str, row: Row, config: SFTDataConfig) -> str:
    """The prompt with the row's reward, as `data.reward_template` puts it; as it is without data.reward_key."""
    if config.reward_key is None:
        return prompt
    return with_reward(config.reward_template, prompt, number(row, config.reward_key))


def conditioned_messages(messages: list[Message], row: Row, config: SFTDataConfig) -> list[Message]:
    """The same of a conversation: its last user message carries the reward."""
    place = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
    if place is None or not isinstance(text := messages[place]["content"], str):
        raise RowError(row.where, "the prompt has no user message of text that could carry the reward")
    return [*messages[:place], {**messages[place], "content": conditioned(text, row, config)}, *messages[place + 1 :]]


def with_reward(template: str, prompt: str, reward: float) -> str:
    return template.format(prompt=prompt, reward=reward)


def check_reward_template(template: str) -> None:
    """UserError unless the template has its {prompt} and a {reward} that changes the text."""
    try:
        texts = [with_reward(template, "\0", reward) for reward in (-1.5, 2.5)]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        texts = ["", ""]
    if texts[0] == texts[1] or any(text.count("\0") != 1 for text in texts):
        raise UserError(
            f"data.reward_template={template!r} must have {{prompt}} once and {{reward}}, e.g. "
            "'{prompt} <rm_score>: {reward:.2f} '; double other braces"
        )
