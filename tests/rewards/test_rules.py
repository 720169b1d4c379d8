"""Built-in rewards: what counts as right."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.rewards.answers import find_last_box, is_too_much, number
from rlhf_suite.rewards.base import Choice, RewardFailure, Sample, Scored
from rlhf_suite.rewards.gym import answer_of
from rlhf_suite.rewards.mathematics import box_text
from rlhf_suite.rewards.rules import make_scorer

GRADED = Path(__file__).with_name("graded_answers.jsonl")


def row(label: str, response: str) -> Sample:
    return Sample(query="prompt " + response, prompt="prompt ", response=response, label=label, datasource="default")


@pytest.fixture(scope="module")
def scorers():
    return {name: make_scorer(name) for name in ("exact_match", "format", "math")}


@pytest.mark.notices(
    "an answer may stand anywhere in the response",
    "rewards/rules.py",
    "row.response.strip() == row.label.strip()",
    "row.label.strip() in row.response",
)
@pytest.mark.parametrize(
    ("label", "response", "reward"),
    [("4321", "4321", 1), ("4321", " 4321\n", 1), ("4321", "4321.", 0), ("4321", "14321", 0), ("a b", "a  b", 0)],
)
def test_exact_match_compares_the_whole_response_but_for_outer_space(scorers, label, response, reward):
    assert scorers["exact_match"]([row(label, response)]) == [Scored(reward, reward)]


@pytest.mark.notices(
    "the first box is the answer", "rewards/answers.py", "begin, start, end = full[-1]", "begin, start, end = full[0]"
)
@pytest.mark.parametrize(
    ("label", "response", "reward"),
    [
        ("1/2", r"so \boxed{0.5}", 1),
        (r"\frac{1}{2}", "the answer is 1/2", 1),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
        ("(1,2)", r"\boxed{(1, 2)}", 1),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
        ("x^2+1", r"\boxed{1+x^2}", 1),
        ("1,234", "it is 1234.", 1),
        ("72%", r"\boxed{72\%}", 1),
        ("$18", r"\boxed{18}", 1),
        (r"\boxed{4}", "so 4", 1),
        ("18", r"first \boxed{3}, no: \boxed{18}", 1),
        ("18", r"first \boxed{18}, no: \boxed{3}", 0),
        ("3", "17 + 4 = 21, so 3", 1),
        ("2", r"\frac{1}{2}", 0),
        ("-3", "3", 0),
        ("10", "1 0", 0),
        ("18", r"\boxed{18", 0),
        ("18", "no idea", 0),
        ("18", "", 0),
        ("21", r"\boxed{21}" + " and then 7" * 500, 1),
    ],
)
def test_math_compares_answers_as_mathematics(scorers, label, response, reward):
    assert scorers["math"]([row(label, response)]) == [Scored(reward, reward, {"unreadable": 0.0})]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("one two three four", 0),
        ("", 0),
        ("again and again and again and again", -0.5),  # 3 of 5 trigrams are repeated: 0.6, of which 0.2 are free
        ("so " * 100, -(97 / 98 - 0.2) / 0.8),
        ("好的好的好的好的", -(4 / 6 - 0.2) / 0.8),
    ],
)
def test_repetition_costs_the_share_of_repeated_n_grams_above_what_is_tolerated(response, reward):
    (outcome,) = make_scorer("repetition", RuleConfig(repetition_ngram=3, repetition_tolerated=0.2))(
        [row("", response)]
    )
    assert outcome.reward == pytest.approx(reward)


@pytest.mark.notices(
    "the same sentence with other numbers is no repetition",
    "rewards/rules.py",
    're.sub(r"\\d+", "0", " "',
    're.sub(r"\\d+", "\\\\g<0>", " "',
)
@pytest.mark.parametrize(
    ("response", "is_seen"),
    [
        ("a" * 10000, True),
        ("abcabcabc" * 100, True),
        (" ".join(f"same text {number}" for number in range(50)), True),
        ("\n".join(f"{a} * {b} = {a * b}" for a in range(9) for b in range(9)), False),
        ("The train leaves at nine, so it arrives before noon. Hence she has two hours to walk to the museum.", False),
    ],
)
def test_repetition_sees_what_is_said_again_without_spaces_or_with_other_numbers(response, is_seen):
    (outcome,) = make_scorer("repetition", RuleConfig(repetition_ngram=8))([row("", response)])
    assert (outcome.reward < -0.5) if is_seen else outcome.reward == 0


def test_repetition_counts_all_turns_of_the_model():
    turns = ["I call the tool now. ", "I call the tool now. "]
    (alone,) = make_scorer("repetition")([row("", turns[1])])
    (both,) = make_scorer("repetition")([replace(row("", turns[1]), turns=turns)])
    assert alone.reward == 0 > both.reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"I think. <answer>so \boxed{4}</answer>", 0),
        ("<answer>\\boxed{4}</answer> \n", 0),
        (r"\boxed{4}", -3),
        (r"<answer>\boxed{4}", -3),
        ("</answer><answer>", -3),
        ("<answer>4</answer>", -2),
        (r"\boxed{3} <answer>4</answer>", -2),
        (r"<answer>\boxed{3}</answer> no <answer>\boxed{4}</answer>", -1),
        (r"<answer><answer>\boxed{4}</answer>", -1),
        (r"<answer>\boxed{4}</answer></answer>", -1),
        (r"<answer>\boxed{4}</answer> and more", -0.5),
    ],
)
def test_answer_tags_has_a_penalty_for_each_wrong_form(response, reward):
    (outcome,) = make_scorer("answer_tags")([row("", response)])
    assert outcome.reward == reward


def test_a_rule_of_ones_own_may_have_named_parts(tmp_path):
    code = """
        def parts(row, config):
            return {"right": row.response == row.label, "short": 1 / len(row.response), "none": None}
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(code))
    rows, name = [row("4", "4"), row("4", "1234")], f"{tmp_path}/own.py:parts"
    assert make_scorer(name)(rows) == [
        Scored(2, 2, {"right": 1, "short": 1}),
        Scored(0.25, 0.25, {"right": 0, "short": 0.25}),
    ]
    assert [each.reward for each in make_scorer(name, None, Choice("right"))(rows)] == [1, 0]


@pytest.mark.notices(
    "a label that makes no sense is a wrong answer",
    "rewards/rules.py",
    'return RewardFailure(str(error), "error")',
    "return Scored(0.0, 0.0)",
)
def test_math_does_not_blame_the_response_for_a_useless_label(scorers):
    (outcome,) = scorers["math"]([row("", "3")])
    assert isinstance(outcome, RewardFailure) and outcome.kind == "error" and "label ''" in outcome.reason


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}, so \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2}", "1,2"),
        (r"\boxed{1}$ or $\boxed{2}", "1,2"),
        (r"\boxed{1} \boxed{}", "1"),
        (r"\fbox{1}", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1}} \boxed{2", "1"),
        (r"{ \boxed{3}", "3"),
        (r"\boxed{}", ""),
        ("boxed{1}", None),
        ("", None),
    ],
)
def test_last_boxed_takes_the_last_box_that_closes(text, content):
    assert find_last_box(text) == content


@pytest.mark.notices(
    "the base of a number is ignored",
    "rewards/mathematics.py",
    "label[1] == answer[1] and bases[0] == bases[1]",
    "label[1] == answer[1]",
)
@pytest.mark.notices(
    "a point is the set of its numbers", "rewards/mathematics.py", "not answer.is_ordered and same_items", "same_items"
)
@pytest.mark.notices(
    "a unit is no part of an answer",
    "rewards/mathematics.py",
    "if unit and other_unit and unit != other_unit:",
    "if unit and other_unit and unit is None:",
)
@pytest.mark.notices(
    "what is denied is the answer",
    "rewards/answers.py",
    "if DENIED.search(sentence):",
    "if DENIED.fullmatch(sentence):",
)
def test_all_graded_answers_are_judged_rightly(scorers):
    """145 right answers in other words, and 109 wrong ones; math-verify alone errs in 36 and 20 of them."""
    rows = [json.loads(line) for line in GRADED.read_text().splitlines()]
    outcomes = scorers["math"]([row(each["label"], each["response"]) for each in rows])
    wrongly = [each for each, outcome in zip(rows, outcomes, strict=True) if outcome.reward != each["right"]]
    assert wrongly == [] and [sum(each["right"] is side for each in rows) for side in (True, False)] == [145, 109]


@pytest.mark.notices(
    "1 < x > 3 is the interval (1,3]",
    "rewards/mathematics.py",
    "if (first in GREATER) != (second in GREATER):",
    "if False:",
)
@pytest.mark.parametrize(
    ("label", "answer", "reward"),
    [
        ("(1,3]", "1 < x \\le 3", 1),
        ("(1,3]", "3 \\ge x > 1", 1),
        ("(1,3]", "1 < x > 3", 0),
        ("(1,3]", "1 < x \\ge 3", 0),
        ("[1,3)", "3 > x < 1", 0),
        ("[1,3]", "1 \\le x \\ge 3", 0),
        ("1 < x < 3", "3 > x > 1", 1),
    ],
)
def test_math_reads_two_signs_that_point_the_same_way_as_an_interval(scorers, label, answer, reward):
    assert scorers["math"]([row(label, f"\\boxed{{{answer}}}")])[0].reward == reward


def test_math_may_want_a_box():
    scorer = make_scorer("math", RuleConfig(math_boxed=True))
    assert [each.reward for each in scorer([row("5", "The answer is 5."), row("5", r"\boxed{5}")])] == [0, 1]


@pytest.mark.notices(
    "towers of powers are given to sympy",
    "rewards/answers.py",
    "(len(power) > 6 or int(power)",
    "(len(power) > 60 and int(power)",
)
@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        "7^{77^{7}}",
        "9**9**9",
        "12345678!",
        "((9!)!)!",
        "(" * 3000,
        "1" * 5000,
        "\\sqrt{" * 60 + "2" + "}" * 60,
    ],
)
def test_an_answer_that_would_keep_sympy_busy_is_wrong_at_once_and_counted(scorers, answer):
    assert is_too_much(answer)
    assert scorers["math"]([row("42", f"\\boxed{{{answer}}}")])[0].reward == 0


@pytest.mark.parametrize("answer", ["2^{2005}", "2^{2^{3}}", "10!", "x^{y^{z}}", "1^{10^9}"])
def test_large_answers_that_can_be_compared_are(answer):
    assert not is_too_much(answer)


@pytest.mark.notices(
    "values are compared absolutely", "rewards/mathematics.py", "RELATIVE * max(abs(a), abs(b))", "RELATIVE * 1e9"
)
@pytest.mark.parametrize(
    ("label", "answer"), [("4e-7", "1e-7"), ("10^{-9}", r"2\cdot 10^{-9}"), ("\\pi", "3.14159265")]
)
def test_values_are_compared_relatively(scorers, label, answer):
    (outcome,) = scorers["math"]([row(label, f"\\boxed{{{answer}}}")])
    assert outcome.reward == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234.50", "1234.5"), ("-.5", "-1/2"), ("1\\frac{4}{5}", "9/5"), ("4.\\overline{6}", "14/3"), ("2/0", None)],
)
def test_numbers_are_read_exactly(text, value):
    assert number(text) == (None if value is None else Fraction(value))


@pytest.mark.timeout(60)  # quadratic time would be hours
def test_last_boxed_is_linear_in_the_number_of_open_boxes():
    assert find_last_box(r"\boxed{" * 50_000) is None


def test_a_bare_percent_sign_does_not_comment_the_box_out():
    assert box_text(r"7% or 8\%") == r"\boxed{7\% or 8\%}"


@pytest.mark.notices(
    "a format may stand anywhere in the response",
    "rewards/rules.py",
    "re.DOTALL).fullmatch(row.response.strip())",
    "re.DOTALL).search(row.response)",
)
@pytest.mark.notices(
    "an empty thought has the right form",
    "config/declarations/reward.py",
    "\\s*{NO_TAG}\\S(?:{NO_TAG}.)*",
    "(?:{NO_TAG}.)*",
)
@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1),
        (" <think>a</think><answer> 4</answer>\n", 1),
        ("<think>a < b</think><answer>4</answer>", 1),
        ("<think></think><answer></answer>", 0),
        ("<think> \n</think><answer>4</answer>", 0),
        ("<think>a</think><answer>1</answer> junk <answer>2</answer>", 0),
        ("<think><think>a</think></think><answer>b</answer>", 0),
        ("<think>a</think><answer>1</answer><think>b</think><answer>2</answer>", 0),
        ("<think><answer>41</answer></think><answer>42</answer>", 0),
        ("<think>" + "</think><answer>" * 4000 + "</answer>x", 0),
        ("<think>a</think> so <answer>4</answer>", 0),
        ("<answer>4</answer>", 0),
        ("Well. <think></think><answer>4</answer>", 0),
        ("<think></think><answer>4</answer> That is all.", 0),
        ("", 0),
    ],
)
def test_format_matches_the_whole_response(scorers, response, reward):
    assert scorers["format"]([row("", response)]) == [Scored(reward, reward)]


def test_format_takes_another_pattern():
    scorer = make_scorer("format", RuleConfig(format_pattern=r".*\\boxed\{\d+\}"))
    assert [each.reward for each in scorer([row("", "so\n\\boxed{12}"), row("", "12")])] == [1, 0]


def test_length_falls_from_its_limit_to_twice_that():
    scorer = make_scorer("length", RuleConfig(length_limit=10))
    assert [each.reward for each in scorer([row("", "x" * n) for n in (0, 10, 15, 20, 99)])] == [1, 1, 0.5, 0, 0]


@pytest.mark.notices(
    "the first answer of a response is scored", "rewards/gym.py", "answers[-1] if answers", "answers[0] if answers"
)
def test_the_last_answer_of_a_response_is_the_one_that_reasoning_gym_scores():
    assert answer_of("<answer>3</answer> no: <answer> 4\n</answer>.") == "4"
    assert answer_of(" 4 ") == "4"
