"""Rewards that come with the suite: 1 for a right response, 0 for a wrong one.

An entry of `MAKERS` makes the rule, with whatever it has to import; the rule gets one row and returns its reward, or
raises `LabelError` when the row's label makes no sense (a wrong label is not a wrong response).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from rlhf_suite.config.reward import RuleConfig
from rlhf_suite.rewards.base import LabelError, Outcome, RewardFailure, RewardRow, Scored, Scorer
from rlhf_suite.rewards.code import make_code
from rlhf_suite.rewards.gym import make_reasoning_gym

Rule = Callable[[RewardRow], float | Scored]


def make_exact_match(config: RuleConfig) -> Rule:
    """The response equals the label, white space at both ends aside."""
    return lambda row: float(row.response.strip() == row.label.strip())


def make_math(config: RuleConfig) -> Rule:
    """The response's answer equals the label as mathematics (1/2 = 0.5 = \\frac{1}{2}), by math-verify.

    The answer is what the last complete \\boxed{} holds; without one, what math-verify finds (an expression after "the
    answer is", else the last expression or number). A response without an answer, or with one that cannot be compared,
    is wrong. math-verify's own time limits work in main threads only and do not interrupt every hang: they are off, the
    worker process has a deadline instead.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns about its missing time limits

    verify(parse("1", parsing_timeout=None), parse("x^2", parsing_timeout=None), timeout_seconds=None)  # loads sympy

    def rule(row: RewardRow) -> float:
        label = last_boxed(row.label) or row.label.strip().strip("$")
        gold = parse(boxed_text(label), parsing_timeout=None)
        if not label or not gold:
            raise LabelError(f"the label {row.label!r} is no mathematics; give a number or a LaTeX expression")
        boxed = last_boxed(row.response)
        answer = parse(row.response if boxed is None else boxed_text(boxed), parsing_timeout=None)
        return float(verify(gold, answer, timeout_seconds=None))

    return rule


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


def make_format(config: RuleConfig) -> Rule:
    """The whole response matches reward.rules.format_pattern ('.' takes line ends too), white space around it aside."""
    pattern = re.compile(config.format_pattern, re.DOTALL)
    return lambda row: float(pattern.fullmatch(row.response.strip()) is not None)


def make_length(config: RuleConfig) -> Rule:
    """1 up to reward.rules.length_limit characters, then falling by the share beyond it, to 0 at twice the limit."""
    return lambda row: min(1.0, max(0.0, 2.0 - len(row.response) / config.length_limit))


MAKERS: dict[str, Callable[[RuleConfig], Rule]] = {
    "exact_match": make_exact_match,
    "math": make_math,
    "code": make_code,
    "format": make_format,
    "length": make_length,
    "reasoning_gym": make_reasoning_gym,
}


def make_scorer(name: str, config: RuleConfig | None = None) -> Scorer:
    """The rule `name` over rows."""
    rule = MAKERS[name](config or RuleConfig())

    def outcome(row: RewardRow) -> Outcome:
        try:
            reward = rule(row)
        except LabelError as error:
            return RewardFailure(str(error), "error")
        return reward if isinstance(reward, Scored) else Scored(reward, reward)

    return lambda rows: [outcome(row) for row in rows]
