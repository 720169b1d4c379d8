"""Rule `reasoning_gym`: the task's own scoring of an answer, for rows of `data.prompt_dataset=reasoning_gym:<task>`.

The answer is what stands in the last <answer>...</answer> of the response, else the whole of it. Several tasks read an
answer by evaluating it as Python, so `rewards.worker` gives up, before the first, what answers must not reach.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from functools import cache
from typing import Any

with suppress(ImportError):  # without the package no run chooses this rule
    import reasoning_gym  # noqa: F401 - it takes a second, which is not to count against the first answer

from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.data.gym import GymTask, make
from rlhf_suite.errors import UserError
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import LabelError, Sample, Scored

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
HELP = "take data.prompt_dataset=reasoning_gym:<task> and data.label_key=label"


@reward_rule(name="reasoning_gym", needs=("label", "locked_process", "time_limit"))
def score_of_task(row: Sample, config: RuleConfig) -> Scored:
    """The score that the task of reasoning-gym gives the answer, mostly 0 to 1.

    An answer at which its scoring raises is worth 0.
    """
    name, settings, entry = read(row.label)
    try:
        task = make_task(name, repr(settings))
    except UserError as error:
        raise LabelError(str(error)) from None
    try:
        score = float(task.dataset.score_answer(answer_of(row.response), entry))
    except Exception:  # whatever a foreign parser makes of a wrong answer
        return Scored(0.0, 0.0, {"unreadable": 1.0})
    return Scored(score, score, {"unreadable": 0.0})


@cache
def make_task(name: str, settings: str) -> GymTask:
    """Return a task with its settings, which come as Python source; it is made once."""
    return make(name, ast.literal_eval(settings), "label")


def answer_of(response: str) -> str:
    answers = ANSWER.findall(response)
    return str(answers[-1] if answers else response).strip()


def read(label: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Task, settings and entry of a row of `data.gym`."""
    try:
        entry = ast.literal_eval(label)
        return entry["task"], entry["settings"], entry["entry"]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        raise LabelError(f"the label {label[:80]!r} is not an entry of reasoning-gym; {HELP}") from None
