"""How prompts become text: `data.input_template`, chat templates, and prompts that say a reward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlhf_suite.config.data import RewardTextConfig
from rlhf_suite.config.formatting import literal
from rlhf_suite.config.models import SFTActorConfig
from rlhf_suite.config.problems import Problem, rule

if TYPE_CHECKING:
    from rlhf_suite.config.runs import DistillRun, DPORun, GenerateRun, KTORun, RMRun, SFTRun, TextRun


# A backslash and an n where a new line was meant; LaTeX commands such as \nabla go on in lower case.
UNTURNED_NEWLINE = re.compile(r"\\n(?![a-z])")
FLAG = "data.chat_template_kwargs"
# What apply_chat_template gives a template itself.
TAKEN = ("messages", "conversation", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template")


def variables_of(settings: Sequence[str]) -> dict[str, object]:
    """Return the variables by name."""
    return {name: literal(value) for name, _, value in (setting.partition(":") for setting in settings)}


def variable_problems(settings: Sequence[str]) -> Iterator[Problem]:
    """Yield the settings that are not `name:value`, or whose name is reserved."""
    for setting in settings:
        name, colon, _ = setting.partition(":")
        if not colon or not name.isidentifier():
            yield Problem(FLAG, f"{setting!r} is not name:value", f"write '{FLAG}=[enable_thinking:false]'")
        elif name in TAKEN:
            yield Problem(FLAG, f"{name} is given to the template by the suite", "remove it")


def with_reward(template: str, prompt: str, reward: float) -> str:
    """Return the prompt with its reward."""
    return template.format(prompt=prompt, reward=reward)


def says_reward(template: str) -> bool:
    """Return whether the template has {prompt} once, and a {reward} that changes the text."""
    try:
        texts = [with_reward(template, "\0", reward) for reward in (-1.5, 2.5)]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return texts[0] != texts[1] and all(text.count("\0") == 1 for text in texts)


@rule
def template_has_one_place(run: TextRun) -> Iterator[Problem]:
    key, template = "data.input_template", run.data.input_template
    if template is None or run.data.apply_chat_template:
        return
    try:
        places = template.format("\0").count("\0")
    except (IndexError, KeyError, ValueError):
        places = 0
    if places != 1:
        fix = f"write {key}=null for no template, or one {{}}; other braces are doubled"
        yield Problem(key, f"{template!r} must have one {{}}, where the prompt goes", fix)
    if UNTURNED_NEWLINE.search(template):
        fix = f"""in bash write $'{key}="..."' with the dollar sign, or put the template in a preset"""
        yield Problem(key, f"{template!r} has a backslash and an n where a new line is meant", fix)


@rule
def variables_are_named(run: TextRun) -> Iterator[Problem]:
    yield from variable_problems(run.data.chat_template_kwargs)


@rule
def several_turns_are_marked(run: SFTRun | DistillRun) -> Iterator[Problem]:
    pretrains = isinstance(run.actor, SFTActorConfig) and run.actor.pretrain_mode_enable
    if run.data.multiturn and not (run.data.apply_chat_template or pretrains):
        what = "needs the chat template, which marks the turns"
        yield Problem("data.multiturn", what, "add data.apply_chat_template=true")


@rule
def pretraining_reads_plain_text(run: SFTRun) -> Iterator[Problem]:
    if run.actor.pretrain_mode_enable:
        for name in ("multiturn", "apply_chat_template"):
            if getattr(run.data, name):
                what = "actor.pretrain_mode_enable trains on every token of plain text"
                yield Problem(f"data.{name}", what, f"write data.{name}=false, or actor.pretrain_mode_enable=false")


@rule
def turns_are_marked(run: SFTRun | DistillRun | DPORun | RMRun | KTORun) -> Iterator[Problem]:
    markers = run.data.turn_markers
    if markers is not None and (len(set(markers)) != 2 or len(markers) != 2 or not all(map(str.strip, markers))):
        what = f"{markers}: the texts that begin a user's turn and an assistant's turn must be two different texts"
        yield Problem("data.turn_markers", what, """write 'data.turn_markers=["Human:","Assistant:"]', or null""")


@rule
def reward_has_its_place(run: SFTRun | DistillRun) -> Iterator[Problem]:
    if run.data.reward_key is None:
        return
    if run.data.multiturn:
        what = "a reward belongs to one answer, and data.multiturn=true trains on several"
        yield Problem("data.reward_key", what, "write data.multiturn=false")
    elif run.data.turn_markers is not None and not run.data.apply_chat_template:
        what = "a dialogue that is used as it is written has no place for the reward"
        yield Problem("data.reward_key", what, "add data.apply_chat_template=true, or give prompt and answer columns")
    yield from reward_template_problems(run.data)


@rule
def target_has_its_place(run: GenerateRun) -> Iterator[Problem]:
    if run.data.target_reward is not None:
        yield from reward_template_problems(run.data)


def reward_template_problems(data: RewardTextConfig) -> Iterator[Problem]:
    if not says_reward(data.reward_template):
        what = f"{data.reward_template!r} must have {{prompt}} once and a {{reward}}; other braces are doubled"
        fix = """write 'data.reward_template="{prompt} <rm_score>: {reward:.2f} "'"""
        yield Problem("data.reward_template", what, fix)
