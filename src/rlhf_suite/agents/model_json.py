"""JSON that a model wrote. What is not JSON, or cannot be passed on as JSON, is a mistake of the model: it is told so,
and the episode goes on."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 64  # lists and objects in one another; Python itself reads and writes only some hundreds
TOO_DEEP = f"more than {MAX_DEPTH} lists and objects are in one another"
NOT_FINITE = "NaN and Infinity are not numbers of JSON"
HALF_PAIR = "a text has half of a surrogate pair (such as \\ud800), which is not a character"


def read_json(text: str) -> Any:
    """Return the value of a text that is JSON.

    Raises:
        ValueError: the text is not JSON, or `find_problem` finds a problem in its value.
    """
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if (problem := find_problem(value)) is not None:
        raise ValueError(problem)
    return value


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads, and other readers of JSON do not."""
    raise ValueError(NOT_FINITE)


def find_problem(value: object) -> str | None:
    """Return why a value cannot be passed on as JSON, None if it can: its depth, its numbers or its texts."""
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return TOO_DEEP
        if isinstance(part, dict):
            waiting += [(inner, depth + 1) for pair in part.items() for inner in pair]
        elif isinstance(part, list | tuple):
            waiting += [(inner, depth + 1) for inner in part]
        elif isinstance(part, float) and not math.isfinite(part):
            return NOT_FINITE
        elif isinstance(part, str) and not is_encodable(part):
            return HALF_PAIR
    return None


def canonical(value: object) -> str:
    """Return a text that is equal for equal values of JSON, whatever the order of names in an object, and whether a
    number is written as 1 or as 1.0."""
    try:
        numbers_alike = json.loads(json.dumps(value, sort_keys=True), parse_int=float)
    except (TypeError, ValueError, RecursionError):  # of a parser of the user's own, or nested very deeply
        return repr(value)
    return repr(numbers_alike)


def is_encodable(text: str) -> bool:
    """Return whether a text has an encoding: no tokenizer, engine or file takes half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
