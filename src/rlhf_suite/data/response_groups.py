"""Scored answers, prompt by prompt, and what a loop trains on of each prompt: the best, best and worst, or all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_suite.config.loop_stages import CHOSEN, INPUT, OUTPUT, REJECTED, SCORE
from rlhf_suite.data.row import Row, joined_columns

# The columns that task=generate makes; a given column of that name is called `input_<name>` in its output.
MADE = ("prompt", "response", "label", "datasource", "sample", "finish_reason", "num_tokens", "score", "reward_query")
NONE = "every answer is cut off or empty"


Selected = list[dict[str, Any]] | str  # rows to train on, or why there are none


@dataclass(frozen=True)
class ScoredResponse:
    """A whole answer to a prompt."""

    text: str
    score: float


@dataclass(frozen=True)
class ResponseGroup:
    """The answers to one prompt, in the order of their sampling, without those that are empty, and those that
    max_new_tokens cut off: these have no end, and would be learned with one."""

    prompt: object  # as the row has it: text or messages
    answers: list[ScoredResponse]
    columns: dict[str, object] = field(default_factory=dict)  # that go on to the rows to train on


def response_groups(path: Path, input_key: str, tools_key: str | None = None) -> Iterator[ResponseGroup]:
    """The groups of a scored output of task=generate whose prompts were in column `input_key`."""
    group, last = None, {"prompt": "", "sample": 0}
    for row in read_lines(path):
        # task=score may have left any answer of a prompt out
        if group is None or row["sample"] <= last["sample"] or row["prompt"] != last["prompt"]:
            if group is not None:
                yield group
            columns = {} if tools_key is None else {tools_key: row.get(input_name(tools_key))}
            group = ResponseGroup(prompt_of(row, input_key), [], columns)
        last = row
        if row["finish_reason"] != "length" and row["response"].strip():
            group.answers.append(ScoredResponse(row["response"], row["score"]))
    if group is not None:
        yield group


def prompt_of(row: dict[str, Any], input_key: str) -> object:
    """What the row that was answered has in column `input_key`, or in the columns of that comma list."""
    names = [name.strip() for name in input_key.split(",")]
    given = {name: row.get(input_name(name)) for name in names}
    return joined_columns(Row(given, "the answers", row["sample"]), input_key)


def input_name(name: str) -> str:
    """What a column of the prompts is called in the output of task=generate."""
    return f"input_{name}" if name in MADE else name


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def best_response(group: ResponseGroup, min_score: float | None) -> Selected:
    """The row of the first answer with the highest score, or why there is none."""
    if not group.answers:
        return NONE
    best = max(group.answers, key=lambda answer: answer.score)
    if min_score is not None and best.score < min_score:
        return f"no answer scores {min_score:g}"
    return [{**group.columns, INPUT: group.prompt, OUTPUT: best.text, SCORE: best.score}]


def best_and_worst_responses(group: ResponseGroup) -> Selected:
    """The row of the first answers with the highest and the lowest score, or why there is none."""
    if not group.answers:
        return NONE
    best, worst = (choose(group.answers, key=lambda answer: answer.score) for choose in (max, min))
    if best.score == worst.score:
        return "all answers score the same"
    scores = {f"{CHOSEN}_{SCORE}": best.score, f"{REJECTED}_{SCORE}": worst.score}
    return [{**group.columns, INPUT: group.prompt, CHOSEN: best.text, REJECTED: worst.text, **scores}]


def all_responses(group: ResponseGroup) -> Selected:
    """A row for each answer, or why there is none."""
    common = {**group.columns, INPUT: group.prompt}
    return [{**common, OUTPUT: each.text, SCORE: each.score} for each in group.answers] or NONE
