"""How a prompt says a reward: the template of `data.reward_template`."""

from __future__ import annotations


def with_reward(template: str, prompt: str, reward: float) -> str:
    """The prompt with its reward."""
    return template.format(prompt=prompt, reward=reward)


def says_reward(template: str) -> bool:
    """Whether the template has its {prompt} once, and a {reward} that changes the text."""
    try:
        texts = [with_reward(template, "\0", reward) for reward in (-1.5, 2.5)]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return texts[0] != texts[1] and all(text.count("\0") == 1 for text in texts)
