"""Overrides that the shell took apart: `actor.adam.lr = 1e-3`, `a= 1`, `a =1`, `a 1`, and values with spaces.

Each is one problem, which says how to write it. The words of it are left out, so that nothing else is said of them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from rlhf_suite.composition.presets import group_names, preset_names
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.runs import TASKS, flags_of

NUMBER = re.compile(r"-\.?\d[\w.+-]*")


def join_words(argv: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Return the words that are whole, and a problem for each override that is not."""
    whole: list[str] = []
    problems = []
    position = 0
    while position < len(argv):
        count = count_pieces(argv, position)
        if count:
            problems.append(taken_apart(argv[position : position + count]))
        else:
            whole.append(argv[position])
        position += count or 1
    return whole, problems


def count_pieces(argv: Sequence[str], position: int) -> int:
    """Return how many words from a position on are one override that was taken apart; 0 for a word that is whole."""
    word, after, later = (argv[at] if at < len(argv) else "" for at in range(position, position + 3))
    name, equals, value = word.partition("=")
    if equals and not name.strip():  # nothing stands before it
        return 2 if word == "=" and is_value(after) else 1
    if name != name.strip():
        return 1
    if not equals:
        if after == "=":
            return 3 if is_value(later) else 2
        return 2 if re.match("=.", after) or (is_name(name) and is_value(after) and not is_name(after)) else 0
    if not value:
        return 2 if is_value(after) and not is_name(after) else 0
    count = 1
    while is_text(name) and position + count < len(argv) and is_rest(argv[position + count]):
        count += 1
    return count if count > 1 else 0


def taken_apart(pieces: Sequence[str]) -> Problem:
    """Return the problem of the pieces of one override."""
    name, equals, value = " ".join(pieces).partition("=")
    key, value = name.strip().lstrip("-"), value.strip()
    if not equals:
        key, _, value = key.partition(" ")
        return Problem(key, "expected key=value", f"write {show(key, value)}", kind="name")
    if not key:
        return Problem(f"={value}", "there is no flag before the equals sign", f"write <flag>={value}", kind="name")
    if len(pieces) > 1 and pieces[0].partition("=")[2]:
        others = " ".join(pieces[1:])
        fix = f"if it belongs to the value, write {show(key, value)}; if not, remove it"
        return Problem(key, f"{others!r} after it is not key=value", fix, kind="name")
    if not value:
        return Problem(
            key, "there is a space before its equals sign, and no value after it", f"write {key}=<value>", kind="name"
        )
    fix = f"write {show(key, value)}"
    return Problem(key, "there are spaces around its equals sign", fix, kind="name")


def show(key: str, value: str) -> str:
    """Return an override as a word of the shell."""
    return shlex.quote(f"{key}={value}")


def is_value(word: str) -> bool:
    """Return whether a word can be the value of an override that begins before it."""
    is_option = word.startswith(("-", "+", "~")) and NUMBER.fullmatch(word) is None
    return bool(word) and "=" not in word and not is_option


def is_flag(name: str) -> bool:
    """Return whether a word is a flag; one with dashes before it takes its value as the next word."""
    return name.lstrip("+") in flags_of(None)


def is_text(name: str) -> bool:
    """Return whether a flag has a value in which there may be spaces."""
    return is_flag(name) and flags_of(None)[name.lstrip("+")].type.base in (str, list, dict)


def is_name(word: str) -> bool:
    """Return whether a word is a flag or a group of presets."""
    return is_flag(word) or word in group_names()


def is_rest(word: str) -> bool:
    """Return whether a word after a whole override may belong to its value: it is not a name of anything."""
    is_preset = word in TASKS or any(word in preset_names(group) for group in group_names())
    return is_value(word) and not is_preset and not is_name(word)
