"""Rule `math`: the response's answer equals the label as mathematics.

Answers are put into one spelling (`answers.py`) and taken apart at their brackets and commas. Numbers are compared
exactly; math-verify compares everything else, and where both sides have a value it must agree relatively.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.answers import (
    MAX_CHARACTERS,
    clean,
    find_last_box,
    find_unboxed,
    is_too_much,
    number,
    without_unit,
)
from rlhf_suite.rewards.base import LabelError, Sample, Scored

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns about its missing time limits
# Loads sympy, which is not to count against the first response.
verify(parse("1", parsing_timeout=None), parse("x^2", parsing_timeout=None), timeout_seconds=None)

RELATIVE = 1e-9  # values that differ by less, relatively, are equal
BASE = re.compile(r"(-?[0-9A-Z]+)_\s*\{?\s*(?:\\text\s*\{\s*)?([0-9a-z]+)\s*\}*")
WORDS = re.compile(r"(?:\\text\s*\{[^{}]*\}|[a-zA-Z' .()-])+")
CHOICE = re.compile(r"\(?([A-F])\)?(?:[.:)].*)?", re.DOTALL)
ASSIGNED = re.compile(r"\s*(?:[a-zA-Z]|\\[a-z]+)(?:_\{?\w+\}?|'|\([a-z]\))*\s*(?:=|\\in)\s*(?![=<>])")
ORDER = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|\\ne(?![a-z])|<|>")
LISTED = re.compile(r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\(?:vee|lor|wedge|land)(?![a-z])")
LISTED_IN_TEXT = re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)(?![a-zA-Z])")
GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d*)?(?:\s*[^\d,;]*)?")
BUILDER = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\mid|:|\||\\vert)\s*(.*)\\\}")
PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-z])")
PERCENT = re.compile(r"(.*?)\s*(?:\\?%|\\text\s*\{\s*(?:percent|\\?%)\s*\}|percent)\s*", re.DOTALL)
NAMED_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
OPEN, CLOSE = ("(", "[", "\\{", "\\langle"), (")", "]", "\\}", "\\rangle")


@reward_rule(name="math", needs=("label", "time_limit"), reads=("math_boxed",))
def mathematics(row: Sample, config: RuleConfig) -> Scored:
    """The response's answer equals the label as mathematics (1/2 = 0.5 = \\frac{1}{2}), by math-verify.

    The answer is what the last complete \\boxed{} holds; without one, what follows "the answer is", else the last
    expression or number, unless reward.rules.math_boxed wants a box. A response without an answer, or with one that
    cannot be compared, is wrong. Numbers are compared exactly, other values relatively. math-verify's own time limits
    work in main threads only and do not interrupt every hang: they are off, the worker process has limits instead.
    """
    label = label_of(row.label)
    boxed = find_last_box(row.response)
    try:
        if boxed is not None:
            verdict = equals(label, clean(short(boxed)))
        else:
            may_be_open = not config.math_boxed and "\\boxed{" not in row.response
            verdict = may_be_open and equals_unboxed(label, find_unboxed(row.response))
    except Exception:  # whatever a parser makes of a wrong answer, or it is too large
        return Scored(0.0, 0.0, {"unreadable": 1.0})
    return Scored(float(verdict), float(verdict), {"unreadable": 0.0})


class TooMuch(ValueError):
    """An answer that is too large to be compared."""


def short(text: str) -> str:
    """Return an answer that is not longer than answers are; raise TooMuch if it is."""
    if len(text) > MAX_CHARACTERS:
        raise TooMuch(f"an answer of {len(text)} characters")
    return text


@lru_cache(maxsize=1024)
def label_of(text: str) -> str:
    """Return a label in the spelling of answers; raise LabelError if it is not mathematics."""
    label = clean(find_last_box(text) or text.strip().strip("$"))
    if not label or is_too_much(label) or (number(label) is None and not parse_answer(label)):
        raise LabelError(f"the label {text!r} is not mathematics; give a number or a LaTeX expression")
    return label


def equals_unboxed(label: str, sentence: str) -> bool:
    """Return whether a sentence has the answer: as a whole, or in its last expression."""
    if not sentence:
        return False
    if is_too_much(short(sentence)):
        raise TooMuch(sentence)
    if equals(label, clean(sentence)):
        return True
    if re.search(r"\d\s*(?:,\s*)?\bor\b", sentence):  # one of two answers
        return False
    parsed = parse(sentence, parsing_timeout=None)
    return bool(parsed) and are_equal(parse_answer(label), parsed) and not_less(label, sentence)


def not_less(label: str, sentence: str) -> bool:
    """Return whether a sentence that orders values ("at least 42") is meant to."""
    return bool(ORDER.search(label)) or not ORDER.search(clean(sentence))


def equals(label: str, answer: str) -> bool:
    """Return whether two answers in one spelling are equal."""
    if not answer:
        return False
    if compact(label) == compact(answer):
        return True
    if is_too_much(answer):
        raise TooMuch(answer)
    if words_of(label):
        return same_words(label, answer)
    if ORDER.search(label) or ORDER.search(answer):
        return same_range(label, answer)
    return same_parts(Parts.of(label), Parts.of(answer))


def words_of(text: str) -> str:
    """Return the words of an answer that has nothing else, in small letters and without brackets; "" if it has."""
    bare = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    if not WORDS.fullmatch(text) or (bare == text and len(re.sub(r"[^a-zA-Z]", "", bare)) < 4):
        return ""
    return re.sub(r"^(?:an?|the) ", "", " ".join(re.sub(r"[().]", " ", bare).split()).lower())


def same_words(label: str, answer: str) -> bool:
    wanted = words_of(label)
    bare = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer).strip()
    if len(wanted) == 1:
        chosen = CHOICE.fullmatch(bare)
        return chosen is not None and chosen[1].lower() == wanted
    return re.sub(r"^(?:an?|the) ", "", " ".join(re.sub(r"[().$]", " ", bare).split()).lower()) == wanted


@dataclass(frozen=True)
class Parts:
    """An answer taken apart: its brackets ("" for a list without) and what stands between its commas."""

    left: str
    right: str
    items: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Parts:
        text = ASSIGNED.sub("", text, count=1) if re.match(r"\s*[a-zA-Z]\s*\\in", text) else text
        for left, right in zip(OPEN, CLOSE, strict=True):
            for end in (right, "]" if right == ")" else ")") if right in ")]" else (right,):
                if text.startswith(left) and text.endswith(end) and is_one_group(text, left, end):
                    items = split(text[len(left) : len(text) - len(end)])
                    if len(items) > 1 or left == "\\{":
                        return cls(left, end, items)
        return cls("", "", split(replace_conjunctions(text, ",")))

    @property
    def is_ordered(self) -> bool:
        return self.left in ("(", "[", "\\langle")


def replace_conjunctions(text: str, sign: str) -> str:
    """Return a text with `sign` in place of "and" and "or"."""
    text = re.sub(r"\\text\s*\{\s*\}", "", LISTED_IN_TEXT.sub(lambda _: sign + "\\text{", text))
    return LISTED.sub(lambda _: sign, text)


def is_one_group(text: str, left: str, right: str) -> bool:
    """Return whether the first bracket closes at the end of the text."""
    depth = 0
    for token in re.finditer(r"\\[{}]|[()\[\]{}]|\\langle|\\rangle", text):
        depth += 1 if token[0].lstrip("\\") in ("(", "[", "{", "langle") else -1
        if depth == 0:
            return token.end() == len(text)
    return False


def split(text: str) -> tuple[str, ...]:
    """Return the parts of a text between the commas and semicolons that stand in no bracket; plus-minus is two."""
    if GROUPED.fullmatch(text.strip()):
        return (text.strip(),)
    parts, depth, start = list[str](), 0, 0
    for token in re.finditer(r"\\[{}]|[()\[\]{},;]|\\begin|\\end", text):
        if token[0] in ",;":
            if depth == 0:
                parts.append(text[start : token.start()])
                start = token.end()
        else:
            depth += 1 if token[0].lstrip("\\") in ("(", "[", "{", "begin") else -1
    parts.append(text[start:])
    items = list[str]()
    for part in (piece.strip() for piece in parts):
        if len(PLUS_MINUS.findall(part)) == 1:
            items += [PLUS_MINUS.sub("+", part), PLUS_MINUS.sub("-", part)]
        elif part:
            items.append(part)
    return tuple(items)


def compact(text: str) -> str:
    """Return a text without spaces but those between digits."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def same_parts(label: Parts, answer: Parts) -> bool:
    """Return whether two answers have equal parts: in the same order in brackets, in any order in a set or a list."""
    is_one = len(label.items) == 1 and not (label.is_ordered or answer.is_ordered)
    if is_one and answer.items and (answer.left == "" or len(answer.items) == 1):
        return all(same_value(label.items[0], item) for item in answer.items)
    if len(label.items) != len(answer.items):
        return False
    if label.is_ordered:
        return same_brackets(label, answer) and all(map(same_value, label.items, answer.items))
    return not answer.is_ordered and same_items(label.items, answer.items)


def same_brackets(label: Parts, answer: Parts) -> bool:
    """Return whether an answer to a point or an interval has its brackets; those of a point may be left out."""
    if answer.left == "":
        return (label.left, label.right) == ("(", ")")
    return answer.left == "\\langle" or (answer.left, answer.right) == (label.left, label.right)


def same_items(label: Sequence[str], answer: Sequence[str]) -> bool:
    left = list(answer)
    for item in label:
        match = next((candidate for candidate in left if same_value(item, candidate)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def same_value(label: str, answer: str) -> bool:
    """Return whether two single answers are equal."""
    if compact(label) == compact(answer):
        return True
    base, other = BASE.fullmatch(label), BASE.fullmatch(answer)
    if base or other:
        return same_base(base, other, answer)
    (label, unit), (answer, other_unit) = without_unit(label), without_unit(answer)
    if unit and other_unit and unit != other_unit:
        return False
    if "=" in answer and "=" not in label:
        *before, answer = answer.split("=")
        if not all(same_side(label, side.strip()) for side in before):
            return False
    if "=" in label and "=" not in answer and ASSIGNED.match(label):
        label = ASSIGNED.sub("", label, count=1)
    return same_number(label.strip(), answer.strip())


def same_side(label: str, side: str) -> bool:
    """Return whether one side of an equation may stand in an answer: it has a letter, or is equal to the label."""
    return not re.search(r"\d", side) or bool(re.search(r"(?<!\\)\b[a-zA-Z]\b", side)) or equals(label, side)


def same_base(label: re.Match[str] | None, answer: re.Match[str] | None, text: str) -> bool:
    """Return whether digits and base agree. An answer may leave the base of the label out, but not add one."""
    if label is None:
        return False
    if answer is None:
        return text.replace(" ", "").replace(",", "") == label[1]
    bases = [NAMED_BASES.get(match[2], match[2]) for match in (label, answer)]
    return label[1] == answer[1] and bases[0] == bases[1]


def same_number(label: str, answer: str) -> bool:
    """Return whether two values are equal: numbers exactly, percentages also as what they are a share of."""
    percent, other = PERCENT.fullmatch(label), PERCENT.fullmatch(answer)
    a, b = number(percent[1] if percent else label), number(other[1] if other else answer)
    if a is not None and b is not None:
        return a == b or (bool(percent) != bool(other) and (a == 100 * b if percent else 100 * a == b))
    if percent or other or "%" in answer or re.search(r"\d\s+\d", answer):  # "4 2" is not 42
        return False
    return are_equal(parse_answer(label), parse_answer(answer))


def parse_answer(text: str) -> Any:
    """Return what math-verify reads in an answer, an empty list if it is nothing."""
    return parse(box_text(text), parsing_timeout=None)


def are_equal(gold: Any, answer: Any) -> bool:
    """Return whether math-verify finds the two equal, and where both have a value, they are so relatively."""
    if not verify(gold, answer, timeout_seconds=None):
        return False
    try:
        a, b = (complex(side[0].rhs if hasattr(side[0], "rhs") else side[0]) for side in (gold, answer))
    except Exception:  # not a number
        return True
    return abs(a - b) <= RELATIVE * max(abs(a), abs(b))


def same_range(label: str, answer: str) -> bool:
    """Return whether inequalities of one variable, or intervals, are the same; any other order only as math-verify
    says.
    """
    ranges = [as_intervals(text) for text in (label, answer)]
    if all(ranges):
        mine, others = (
            [Parts.of(part.strip()) for part in intervals.split("\\cup")] for intervals in ranges if intervals
        )
        return len(mine) == len(others) and all(any(same_parts(a, b) for b in others) for a in mine)
    if ORDER.search(label) and ORDER.search(answer):
        return are_equal(parse_answer(label), parse_answer(answer))
    return False


BOUND = r"([^<>\\]*(?:\\(?!le|ge|ne)[^<>\\]*)*)"
SIGN = r"(\\le|\\ge|<|>)"
ONE_SIDED = re.compile(rf"([a-zA-Z])\s*{SIGN}{BOUND}")
OTHER_SIDE = re.compile(rf"{BOUND}{SIGN}\s*([a-zA-Z])")
TWO_SIDED = re.compile(rf"{BOUND}{SIGN}\s*([a-zA-Z])\s*{SIGN}{BOUND}")
GREATER = (">", "\\ge")
TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


def as_intervals(text: str) -> str | None:
    """Return inequalities of one variable as intervals, intervals as they are, and None for anything else."""
    text = BUILDER.sub(r"\1", text).strip()
    if not ORDER.search(text):
        bare = re.sub(r"^\s*[a-zA-Z]\s*\\in(?![a-z])\s*", "", text)
        return bare if bare[:1] in ("(", "[") else None
    parts = [as_interval(part.strip(" ,")) for part in replace_conjunctions(text, "\\cup").split("\\cup")]
    return "\\cup".join(map(str, parts)) if all(parts) else None


def as_interval(text: str) -> str | None:
    if match := TWO_SIDED.fullmatch(text):
        low, first, _, second, high = (group.strip() for group in match.groups())
        if (first in GREATER) != (second in GREATER):  # 1 < x > 3 is not an interval
            return None
        if first in GREATER:
            low, first, second, high = high, TURNED[second], TURNED[first], low
        return f"{'(' if first == '<' else '['}{low},{high}{')' if second == '<' else ']'}"
    if match := ONE_SIDED.fullmatch(text):
        sign, bound = match[2], match[3].strip()
    elif match := OTHER_SIDE.fullmatch(text):
        sign, bound = TURNED[match[2]], match[1].strip()
    else:
        return None
    if not bound:
        return None
    if sign in ("<", "\\le"):
        return f"(-\\infty,{bound}{')' if sign == '<' else ']'}"
    return f"{'(' if sign == '>' else '['}{bound},\\infty)"


def box_text(content: str) -> str:
    """Return \\boxed{content}; a bare % would start a LaTeX comment."""
    escaped = re.sub(r"(?<!\\)%", r"\\%", content)
    return f"\\boxed{{{escaped}}}"
