"""Rule `code`: programs that pass their tests, and those that do not."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.rewards.base import LabelError, Sample, Scored
from rlhf_suite.rewards.code import code as rule
from rlhf_suite.rewards.code import program
from rlhf_suite.sandbox.programs import Limits, run_python

pytestmark = pytest.mark.stack

PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3", "7\n"]}
ADDS = "print(sum(map(int, input().split())))"


def scored(response: str, label: object) -> Scored:
    text = label if isinstance(label, str) else json.dumps(label)
    return rule(Sample("", "", response, text, "default"), RuleConfig(code_timeout_s=20.0))


@pytest.mark.notices(
    "a program that passes one test is right",
    "rewards/code.py",
    "right = float(passed == 1.0)",
    "right = float(passed > 0.0)",
)
@pytest.mark.notices("the first program of a response is run", "rewards/code.py", "chosen[-1]", "chosen[0]")
@pytest.mark.notices(
    "a program's exit code does not matter",
    "sandbox/programs.py",
    "program.exit_code == 0",
    "program.exit_code is not None",
)
@pytest.mark.notices(
    "tests that end early count as passed",
    "sandbox/interpreter.py",
    "PEER_ANSWERS, PEER_ASKS)) is None:",
    "PEER_ANSWERS, PEER_ASKS)) in (None, 0):",
)
@pytest.mark.parametrize(
    ("response", "label", "passed"),
    [
        ("def f(x): return 10**x", ["assert f(5000) == 10**5000", "assert f(0) == 1"], 1.0),
        (ADDS, PAIRS, 1.0),
        (f"so:\n```python\n{ADDS}\n```\n", [{"input": "1 2", "output": "3"}], 1.0),
        (f"```python\nprint(0)\n```\nno:\n```py\n{ADDS}\n```", PAIRS, 1.0),
        ("print(3)", PAIRS, 0.5),
        ("import sys; sys.exit(0)", PAIRS, 0.0),
        (f"import sys; {ADDS}; sys.exit(0)", PAIRS, 1.0),
        (f"import sys; {ADDS}; sys.exit(1)", PAIRS, 0.0),
        (f"import atexit; atexit.register(lambda: {ADDS})", PAIRS, 1.0),
        (f"import threading; threading.Thread(target=lambda: {ADDS}).start()", PAIRS, 1.0),
        ("def f(x): return 9", {"asserts": ["assert f(1) == 9", "import sys; sys.exit(0)"]}, 0.0),
        ("def f(x): return 2 * x", {"asserts": ["assert f(1) == 2", "assert f(2) == 4"]}, 1.0),
        ("def f(x): return 2", ["assert f(1) == 2", "assert f(2) == 4"], 0.0),
        ("I do not know.", PAIRS, 0.0),
        ("while True: input()", PAIRS, 0.0),
    ],
)
def test_a_program_is_right_when_it_passes_every_test(response, label, passed):
    result = scored(response, label)
    assert (result.reward, result.score) == (float(passed == 1), float(passed == 1))
    assert result.extra == {"tests_passed": passed, "tests_timed_out": 0.0}


SQUARE = "def f(x):\n    return x * x"
INDENTED = "   def f(x):\n       return x * x"


@pytest.mark.notices(
    "a block of output is run as the program",
    "rewards/code.py",
    'for names in (NAMED, ("",)):',
    'for names in ((*NAMED, ""),):',
)
@pytest.mark.parametrize(
    "response",
    [
        f"```python3\n{SQUARE}\n```",
        f"```{{.python}}\n{SQUARE}\n```",
        f"~~~python\n{SQUARE}\n~~~",
        f"```python\r\n{SQUARE}\r\n```\r\n",
        f"```python\n{SQUARE}\n",
        f"1. Code:\n   ```python\n{INDENTED}\n   ```",
        f"```python\n{SQUARE}\n```\nOutput:\n```\n4\n```",
        f"```\n{SQUARE}\n```\n```bash\npython f.py\n```",
        f"```python\n{SQUARE}```",
        f'```python\n"""```doc```"""\n{SQUARE}\n```',
    ],
)
def test_the_program_is_found_in_whatever_fence_it_stands(response):
    assert program(response).strip().endswith(SQUARE)


@pytest.mark.parametrize(
    ("imports", "value"),
    [
        ("from fractions import Fraction", "Fraction(4, 3)"),
        ("from decimal import Decimal", "Decimal('4.50')"),
        ("from collections import deque", "deque([2, 4])"),
        ("import datetime", "datetime.date(2020, 1, 2)"),
        ("import datetime", "datetime.datetime(2020, 1, 2, 3)"),
    ],
)
def test_exact_numbers_dates_and_queues_are_compared(imports, value):
    label = [f"{imports}\nassert f() == {value}"]
    assert scored(f"{imports}\ndef f(): return {value}", label).reward == 1
    assert scored("def f(): return 4", label).reward == 0


@pytest.mark.notices(
    "output after the first megabyte is not compared",
    "sandbox/programs.py",
    "program.output_bytes = MAX_PROGRAM_OUTPUT_BYTES",
    "pass",
)
def test_output_of_megabytes_is_compared_to_its_end():
    right = "\n".join(map(str, range(250_000)))
    for end, reward in (("", 1), ("; print(7)", 0)):
        code = "print('\\n'.join(map(str, range(250_000))))" + end
        assert scored(code, {"inputs": [""], "outputs": [right]}).reward == reward


@pytest.mark.notices(
    "tests may use a helper of the program",
    "rewards/code.py",
    "if HELPER.match(name)]",
    "if HELPER.fullmatch(name * 2)]",
)
@pytest.mark.parametrize("test", ["assert isclose(f(2), 4)", "assert_close(f(2), 4)", "check(f)"])
def test_tests_that_the_program_could_decide_are_the_labels_mistake(test):
    with pytest.raises(LabelError, match="which they do not define"):
        scored("def check(f): pass", [test])


BAD = ["[" * 5000, "", "42", "{}", '{"inputs": ["1"], "outputs": []}', "[]", '{"asserts": [1]}', "[[1]]"]


@pytest.mark.parametrize("label", BAD, ids=range(len(BAD)))
def test_a_label_without_tests_is_not_the_programs_fault(label):
    with pytest.raises(LabelError, match="the label holds no tests"):
        scored("print(1)", label)


def test_a_program_sees_neither_keys_nor_files_but_may_use_its_own_folder(monkeypatch):
    monkeypatch.setenv("RLHF_SUITE_REWARD_TOKEN", "s3cret")
    code = "import os; print(sorted(os.environ), os.listdir('.')); open('x', 'w').write('y'); print(open('x').read())"
    ran = run_python(code, "", Limits(20.0, 512))
    assert ran.problem is None
    assert ran.stdout == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'TMPDIR'] []\ny\n"


def test_threads_and_installed_packages_work():
    code = (
        "import threading, numpy\n"
        "t = threading.Thread(target=lambda: print(numpy.arange(4).sum()))\n"
        "t.start(); t.join()"
    )
    assert run_python(code, "", Limits(60.0, 1024)).stdout == "6\n"


@pytest.mark.notices(
    "every test of a program has all its seconds",
    "rewards/code.py",
    "left = max(deadline - time.monotonic(), 0.01)",
    "left = config.code_timeout_s",
)
def test_the_tests_of_a_program_share_its_seconds():
    """Each of them takes more than half of the two seconds: one may pass, two cannot."""
    code = "import time; time.sleep(1.2); print(3)"
    label = json.dumps({"inputs": ["a", "b"], "outputs": ["3", "3"]})
    result = rule(Sample("", "", code, label, "default"), RuleConfig(code_timeout_s=2.0))
    assert (result.reward, result.extra["tests_timed_out"]) == (0.0, 1.0)
