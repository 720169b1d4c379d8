"""Rule `math`: the response's answer equals the label as mathematics, by math-verify."""

from __future__ import annotations

import logging
import re

from math_verify import parse, verify

from rlhf_suite.config.reward import RuleConfig
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import LabelError, Sample

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns about its missing time limits
# Loads sympy, which is not to count against the first response.
verify(parse("1", parsing_timeout=None), parse("x^2", parsing_timeout=None), timeout_seconds=None)


@reward_rule(name="math", needs=("label", "time_limit"))
def mathematics(row: Sample, config: RuleConfig) -> float:
    """The response's answer equals the label as mathematics (1/2 = 0.5 = \\frac{1}{2}), by math-verify.

    The answer is what the last complete \\boxed{} holds; without one, what math-verify finds (an expression after "the
    answer is", else the last expression or number). A response without an answer, or with one that cannot be compared,
    is wrong. math-verify's own time limits work in main threads only and do not interrupt every hang: they are off, the
    worker process has a deadline instead.
    """
    label = last_boxed(row.label) or row.label.strip().strip("$")
    gold = parse(boxed_text(label), parsing_timeout=None)
    if not label or not gold:
        raise LabelError(f"the label {row.label!r} is not mathematics; give a number or a LaTeX expression")
    boxed = last_boxed(row.response)
    answer = parse(row.response if boxed is None else boxed_text(boxed), parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))


def boxed_text(content: str) -> str:
    """\\boxed{content}; a bare % would start a LaTeX comment."""
    escaped = re.sub(r"(?<!\\)%", r"\\%", content)
    return f"\\boxed{{{escaped}}}"


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...} whose braces close, or None. One pass, however many are left open."""
    found: tuple[int, int] | None = None  # start and end of the content
    opened: list[tuple[int, bool]] = []  # of each brace still open: where its content starts, whether it is a box
    for token in re.finditer(r"\\boxed\{|\\.|[{}]", text, re.DOTALL):
        if token[0].endswith("{") and token[0] != "\\{":
            opened.append((token.end(), len(token[0]) > 1))
        elif token[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and (found is None or start > found[0]):
                found = start, token.start()
    return text[found[0] : found[1]] if found else None
