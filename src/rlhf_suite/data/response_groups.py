"""Scored responses grouped by prompt, and the rows that a loop trains on: the best, the best and the worst, or all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_suite.config.plan.loop_stages import CHOSEN, INPUT, OUTPUT, REJECTED, SCORE
from rlhf_suite.data.row import Row, join_columns

# The columns that task=generate writes; an input column with one of these names is called `input_<name>` there.
MADE = ("prompt", "response", "label", "datasource", "sample", "finish_reason", "num_tokens", "score", "reward_query")
RENAMED = "input_"
NONE = "every response is cut off or empty"


Selected = list[dict[str, Any]] | str  # the rows to train on, or the reason why there are none


@dataclass(frozen=True)
class ScoredResponse:
    """A complete response and its score."""

    text: str
    score: float


@dataclass(frozen=True)
class ResponseGroup:
    """The responses to one prompt, in the order of sampling.

    Empty responses are not in it. Responses that max_new_tokens cut off are not in it either: a model trained on them
    would learn an end of sequence where the text did not end.
    """

    prompt: object  # as the row has it: text or messages
    responses: list[ScoredResponse]
    columns: dict[str, object] = field(default_factory=dict)  # further columns, copied to the rows to train on


def response_groups(path: Path, input_key: str, tools_key: str | None = None) -> Iterator[ResponseGroup]:
    """Yield the groups of a scored output file of task=generate whose prompts came from column `input_key`."""
    group, last = None, {"prompt": "", "sample": 0}
    for row in read_lines(path):
        # The sample numbers may have gaps: task=score may have dropped any response of a prompt.
        if group is None or row["sample"] <= last["sample"] or row["prompt"] != last["prompt"]:
            if group is not None:
                yield group
            columns = {} if tools_key is None else {tools_key: row.get(input_name(tools_key, row))}
            group = ResponseGroup(prompt_of(row, input_key), [], columns)
        last = row
        if row["finish_reason"] != "length" and row["response"].strip():
            group.responses.append(ScoredResponse(row["response"], row["score"]))
    if group is not None:
        yield group


def prompt_of(row: dict[str, Any], input_key: str) -> object:
    """Return the prompt of an output row: the value of column `input_key`, or of the columns in that comma list."""
    names = [name.strip() for name in input_key.split(",")]
    given = {name: row.get(input_name(name, row)) for name in names}
    return join_columns(Row(given, "the responses", row["sample"]), input_key)


def input_name(name: str, row: Mapping[str, Any]) -> str:
    """Return the name that an input column has in a row of the output of task=generate."""
    renamed = f"{RENAMED}{name}"
    return renamed if name in MADE or (name.startswith(RENAMED) and renamed in row) else name


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .jsonl file."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def best_response(group: ResponseGroup, min_score: float | None) -> Selected:
    """Return the row of the first response with the highest score, or the reason why there is none."""
    if not group.responses:
        return NONE
    best = max(group.responses, key=lambda response: response.score)
    if min_score is not None and best.score < min_score:
        return f"no response scores {min_score:g} or more"
    return [{**group.columns, INPUT: group.prompt, OUTPUT: best.text, SCORE: best.score}]


def best_and_worst_responses(group: ResponseGroup) -> Selected:
    """Return the row of the first responses with the highest and the lowest score, or the reason why there is none."""
    if not group.responses:
        return NONE
    best, worst = (choose(group.responses, key=lambda response: response.score) for choose in (max, min))
    if best.score == worst.score:
        return "all responses score the same"
    scores = {f"{CHOSEN}_{SCORE}": best.score, f"{REJECTED}_{SCORE}": worst.score}
    return [{**group.columns, INPUT: group.prompt, CHOSEN: best.text, REJECTED: worst.text, **scores}]


def all_responses(group: ResponseGroup) -> Selected:
    """Return one row per response, or the reason why there is none."""
    common = {**group.columns, INPUT: group.prompt}
    return [{**common, OUTPUT: response.text, SCORE: response.score} for response in group.responses] or NONE
