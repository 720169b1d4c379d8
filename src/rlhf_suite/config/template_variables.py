"""`data.chat_template_kwargs`: variables that a chat template reads, as a list of `name:value`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf_suite.config.formatting import literal
from rlhf_suite.config.problems import Problem

FLAG = "data.chat_template_kwargs"
# What apply_chat_template gives a template itself.
TAKEN = ("messages", "conversation", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template")


def variables_of(settings: Sequence[str]) -> dict[str, object]:
    """The variables by name."""
    return {name: literal(value) for name, _, value in (setting.partition(":") for setting in settings)}


def variable_problems(settings: Sequence[str]) -> Iterator[Problem]:
    """Settings that are not `name:value`, or whose name is not free."""
    for setting in settings:
        name, colon, _ = setting.partition(":")
        if not colon or not name.isidentifier():
            yield Problem(FLAG, f"{setting!r} is not name:value", f"write '{FLAG}=[enable_thinking:false]'")
        elif name in TAKEN:
            yield Problem(FLAG, f"{name} is given to the template by the suite", "remove it")
