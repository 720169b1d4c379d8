"""Rule `code`: the response's Python program passes the tests of the row's label, in the sandbox.

The label is JSON: {"inputs": [text, ...], "outputs": [text, ...]} or [{"input": text, "output": text}, ...] for
programs that read and print, or {"asserts": [statement, ...]} (also a plain list of statements) for functions.
The program is the last ```python block, else the last block without a name, or else the whole response. Output is
compared line by line, white space at the ends of lines and of the whole aside.
"""

from __future__ import annotations

import json
import re
import textwrap
import time
from dataclasses import dataclass, replace
from typing import Any

from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import LabelError, Sample, Scored
from rlhf_suite.sandbox.calls import free_names
from rlhf_suite.sandbox.programs import MAX_PROGRAM_OUTPUT_BYTES, Limits, run_checks, run_python

FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*\{?[ \t]*\.?([\w+-]*)[^`]*$")
NAMED = ("python", "python3", "py", "py3")  # a block of another language is not a program
HELPER = re.compile(r"(?:assert\w*|is_?close|all_?close|array_equal|approx|raises|check)$", re.IGNORECASE)


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
    """Return the code of a response: its last block that is named python, else its last one without a name."""
    blocks = find_blocks(response)
    for names in (NAMED, ("",)):
        if chosen := [text for name, text in blocks if name in names]:
            return chosen[-1]
    return response


def find_blocks(response: str) -> list[tuple[str, str]]:
    """Return the blocks of a response in backticks or tildes, each as its name in small letters and its text without
    the indentation. The last one need not be closed.
    """
    blocks = list[tuple[str, str]]()
    fence, name, inside = "", "", list[str]()
    for line in response.splitlines():
        bare = line.strip()
        if not fence:
            if opened := FENCE.match(line):
                fence, name, inside = opened[2], opened[3].lower(), []
        elif bare.startswith(fence) and not bare.strip(fence[0]):
            blocks.append((name, textwrap.dedent("\n".join(inside))))
            fence = ""
        elif bare.endswith(fence) and bare.count(fence) == 1:  # it is closed after its last line
            blocks.append((name, textwrap.dedent("\n".join([*inside, line.rstrip().removesuffix(fence)]))))
            fence = ""
        else:
            inside.append(line)
    return [*blocks, (name, textwrap.dedent("\n".join(inside)))] if fence else blocks


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def tests_of(label: str) -> Tests:
    """The tests that a label holds."""
    try:
        value = json.loads(label)
        tests = read(value)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LabelError(f"the label holds no tests ({error}); see docs/rewards_code.md") from None
    if lent := [name for name in names_of(tests.asserts) if HELPER.match(name)]:
        says = f"they use {', '.join(lent)}, which they do not define: the program would decide by defining it"
        raise LabelError(f"the tests of the label cannot judge a program: {says}; import or define it in the tests")
    if any(len(wanted) > MAX_PROGRAM_OUTPUT_BYTES for _, wanted in tests.pairs):
        raise LabelError(
            f"the label expects more output than the suite keeps of a program ({MAX_PROGRAM_OUTPUT_BYTES} bytes)"
        )
    if not tests.pairs and not tests.asserts:
        raise LabelError("the label holds no tests: its lists are empty; see docs/rewards_code.md")
    return tests


def names_of(asserts: tuple[str, ...]) -> list[str]:
    """Return the names that tests take from the program; none where they cannot be parsed."""
    try:
        return free_names(list(asserts))
    except (SyntaxError, ValueError, RecursionError):
        return []


def read(value: Any) -> Tests:
    if isinstance(value, dict) and "asserts" in value:
        return Tests(asserts=texts(value["asserts"]))
    if isinstance(value, dict):
        return Tests(tuple(zip(texts(value["inputs"]), texts(value["outputs"]), strict=True)))
    if all(isinstance(case, dict) for case in value):
        pairs = [(case["input"], case["output"]) for case in value]
        return Tests(tuple(zip(texts([p[0] for p in pairs]), texts([p[1] for p in pairs]), strict=True)))
    return Tests(asserts=texts(value))


def texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("a list of texts is expected")
    return tuple(values)
