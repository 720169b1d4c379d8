"""Checks of functions that are in another process: right programs pass as if they were here, wrong ones do not."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import pytest

from rlhf_suite.sandbox.calls import check, free_names, serve

pytestmark = pytest.mark.stack

STACK = (
    "class Stack:\n def __init__(s): s.held = []\n def push(s, x): s.held.append(x)\n def pop(s): return s.held.pop()"
)
EVERYTHING = "class Any:\n def __eq__(s, other): return True\n def __contains__(s, item): return True\n"
RAISES = "try:\n    f(1)\n    raise AssertionError\nexcept ValueError as error:\n    assert str(error) == 'no'"
CANDIDATE = "def check(candidate):\n    assert math.isclose(candidate(0.1), 0.1)\n    assert candidate('a') == 'a'"

VALUES = "{1: {2}, (): frozenset()}, [1.5, None, b'x', 1j, range(0, 9, 2), True]"
RIGHT = {
    "plain values": (f"def f(x): return x, {VALUES}", [f"assert f(1) == (1, {VALUES})"]),
    "floats that are none": ("def f(): return [float('inf'), float('nan')]", ["a, b = f()", "assert a > 9 and b != b"]),
    "texts": ("def f(x): return x + '\\ud800\\n\"'", ["assert f('\\u00e9') == '\\u00e9\\ud800\\n\"'"]),
    "subclasses of plain types": ("import collections\nf = collections.Counter", ["assert f('aa') == {'a': 2}"]),
    "arrays": ("import numpy\nf = numpy.arange", ["assert (f(2) == np.array([0, 1])).all()", "assert f(4)[2] == 2"]),
    "numbers of numpy's": ("import numpy\ndef f(): return [numpy.int64(3)]", ["assert f() == [3]"]),
    "objects with state": (STACK, ["s = Stack()", "s.push(3)", "assert s.held == [3]", "assert s.pop() == 3"]),
    "attributes that are set": (STACK, ["s = Stack()", "s.held = [7]", "assert s.pop() == 7"]),
    "objects as arguments": (f"{STACK}\ndef f(s): return s.pop()", ["s = Stack()", "s.push(4)", "assert f(s) == 4"]),
    "lists changed in place": (
        "def f(a, b): a.sort(); b.add(1)", ["a, b = [2, 1], set()", "f(a, b)", "assert (a, b) == ([1, 2], {1})"],
    ),
    "generators": ("def f(n): yield from range(n)", ["assert list(f(2)) == [0, 1]", "g = f(2)", "assert next(g) == 0"]),
    "functions as arguments": (
        "def f(a, key): return sorted(a, key=key)",
        ["assert f([1, 2], lambda x: -x) == [2, 1]", "assert f(['aa', 'b'], key=len) == ['b', 'aa']"],
    ),
    "exceptions": ("def f(x): raise ValueError('no')", [RAISES]),
    "functions of the checks": ("def f(x): return x", [CANDIDATE, "check(f)"]),
    "variables": ("limit = 3", ["assert limit == 3"]),
}  # fmt: skip
WRONG = {
    "another value": ("def f(x): return 2", ["assert f(1) == 1"]),
    "no such function": ("def g(x): return 1", ["assert f(1) == 1"]),
    "an exception": ("def f(x): raise KeyError(x)", ["assert f(1) == 1"]),
    "an object equal to everything": (f"{EVERYTHING}\ndef f(x): return Any()", ["assert f(1) == 1"]),
    "an object equal to everything inside": (f"{EVERYTHING}\ndef f(x): return [Any()]", ["assert f(1) == [1]"]),
    "an object that holds everything": (f"{EVERYTHING}\ndef f(x): return Any()", ["assert 1 in f(1)"]),
    "an object that says it is a number": (
        "class N:\n def __float__(s): return 1.0\n def __sub__(s, o): return 0.0\ndef f(x): return N()",
        ["assert math.isclose(f(1), 1.0)"],
    ),
    "a builtin of its own": ("abs = lambda x: 0\ndef f(x): return 9", ["assert abs(f(1) - 1) < 1e-6"]),
    "a module of its own": (
        "class math:\n def isclose(*_): return True\ndef f(x): return 9",
        ["assert math.isclose(f(1), 1)"],
    ),
}
# The program answers the first call with this line instead of a value.
LINE = "def f(x):\n import os\n os.write({fd}, {line!r})\n import time; time.sleep(0.2)"
ORDERS = {
    "an attribute of a function": b'{"do": "getattr", "to": 0, "args": ["__globals__"], "named": {}}\n',
    "a function that was not lent": b'{"do": "call", "to": 5, "args": [], "named": {}}\n',
    "no JSON": b"True\n\n",
    "no value": b"[1]\n",
    "an unknown kind": b'{"value": ["eval", "1"]}\n',
}


def passes(program: str, checks: list[str]) -> bool:
    """Whether checks pass on a program, which runs in a thread of its own."""
    (asked, asks), (answered, answers) = os.pipe(), os.pipe()
    program = program.replace("{fd}", str(answers))
    threading.Thread(target=served, args=(program, asked, answers), daemon=True).start()
    try:
        check(checks, answered, asks)
    except Exception:
        return False
    return True


def served(program: str, asked: int, answers: int) -> None:
    with suppress(Exception):  # of a program that gave orders, when it meets their replies
        serve(program, asked, answers)


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_program_passes(what):
    assert passes(*RIGHT[what])
    program, checks = RIGHT[what]
    names: dict[str, object] = {}  # as it would in one process
    exec(f"import math\nimport numpy as np\n{program}", names)
    for each in checks:
        exec(each, names)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_program_does_not_pass_whatever_it_says_of_itself(what):
    assert not passes(*WRONG[what])


@pytest.mark.parametrize("what", ORDERS)
def test_a_program_cannot_give_orders_to_its_checks(what):
    program = LINE.replace("{line!r}", repr(ORDERS[what]))
    assert not passes(program, ["assert f(lambda x: x) == 1"])


def test_names_that_checks_make_themselves_are_not_the_programs():
    checks = [
        "import re as r\nx, (y, *z) = f(g)",
        "def h(a, *b, c=1):\n    return [w for w in a]",
        "assert len(h(x)) == k",
    ]
    assert free_names(checks) == ["f", "g", "k"]
