"""Rule `code`: the response's Python program passes the tests of the row's label, in the sandbox.

The label is JSON: {"inputs": [text, ...], "outputs": [text, ...]} or [{"input": text, "output": text}, ...] for
programs that read and print, or {"asserts": [statement, ...]} (also a plain list of statements) for functions.
The program is the last ```python block, or else the whole response. Output is compared line by line, white space at the
ends of lines and of the whole aside.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, replace
from typing import Any

from rlhf_suite.config.reward import RuleConfig
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import LabelError, Sample, Scored
from rlhf_suite.sandbox.programs import Limits, run_checks, run_python

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Tests:
    """`pairs` of input and output, or `asserts`: one of the two."""

    pairs: tuple[tuple[str, str], ...] = ()
    asserts: tuple[str, ...] = ()


@reward_rule(needs=("label", "tests"), reads=("code_timeout_s", "code_memory_mb", "code_allow_weaker"))
def code(row: Sample, config: RuleConfig) -> Scored:
    """1 when the response's Python program passes all tests of the label, in the sandbox; else 0.

    `tests_passed` says which share did. All tests of a response share its seconds.
    """
    tests, source = tests_of(row.label), program(row.response)
    limits = Limits(config.code_timeout_s, config.code_memory_mb, config.code_allow_weaker)
    deadline = time.monotonic() + config.code_timeout_s
    if tests.asserts:
        ran = run_checks(source, tests.asserts, limits)
        return verdict(float(ran.problem is None), ran.timed_out)
    for index, (given, wanted) in enumerate(tests.pairs):
        left = max(deadline - time.monotonic(), 0.01)
        ran = run_python(source, given, replace(limits, timeout_s=left))
        if ran.problem is not None or lines(ran.stdout) != lines(wanted):
            return verdict(index / len(tests.pairs), ran.timed_out)
    return verdict(1.0, False)


def verdict(passed: float, timed_out: bool) -> Scored:
    """A wrong program is a wrong answer, also when it hangs or crashes."""
    right = float(passed == 1.0)
    return Scored(right, right, {"tests_passed": passed, "tests_timed_out": float(timed_out)})


def program(response: str) -> str:
    """The code of a response."""
    blocks = BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def tests_of(label: str) -> Tests:
    """The tests that a label holds."""
    try:
        found = json.loads(label)
        tests = read(found)
    except (ValueError, KeyError, TypeError) as error:
        raise LabelError(f"the label holds no tests ({error}); see rule code in docs/rewards.md") from None
    if not tests.pairs and not tests.asserts:
        raise LabelError("the label holds no tests: its lists are empty; see rule code in docs/rewards.md")
    return tests


def read(found: Any) -> Tests:
    if isinstance(found, dict) and "asserts" in found:
        return Tests(asserts=texts(found["asserts"]))
    if isinstance(found, dict):
        return Tests(tuple(zip(texts(found["inputs"]), texts(found["outputs"]), strict=True)))
    if all(isinstance(each, dict) for each in found):
        pairs = [(each["input"], each["output"]) for each in found]
        return Tests(tuple(zip(texts([p[0] for p in pairs]), texts([p[1] for p in pairs]), strict=True)))
    return Tests(asserts=texts(found))


def texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("a list of texts is expected")
    return tuple(values)
