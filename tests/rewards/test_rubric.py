"""Rubrics: what is refused with its line, and how a text is quoted."""

from __future__ import annotations

import pytest

from rlhf_suite.rewards.rubric import RubricError, make_harmless, read_file, read_rubric


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("No response.", "write {response} where it belongs"),
        ("{response}\n{respons}", "line 2: {respons} is not a placeholder; did you mean {response}?"),
        ("{response}\n# Criteria\n- a\n", "line 3: a criterion is written"),
        ("{response}\n# Criteria\n- a (x): b\n", "line 3: the weight 'x' is not a number"),
        ("{response}\n# Criteria\n- a (-1): b\n", "line 3: the weight '-1' is not a number"),
        ("{response}\n# Criteria\n- a (nan): b\n", "line 3: the weight 'nan' is not a number"),
        ("{response}\n# Criteria\n- a (inf): b\n", "line 3: the weight 'inf' is not a number"),
        ("{response}\n# Criteria\n- a: b\n- a: c\n", "line 4: the criterion a occurs twice"),
        ("{response}\n# Criteria\n- a (0): b\n", "every criterion has the weight 0"),
        ("{response}\n# Criteria\n- a (1e308): b\n- c (1e308): d\n", "line 3: the weight '1e308' is not a number from"),
        ("{response}\n# Criteria\n\n1. a: b\n2. c: d\n", "line 2: there is no criterion below this heading"),
        ("{response}\n# Criteria\n  - a: b\n", "line 2: there is no criterion below this heading"),
        ("{response}\n**Criteria:**\n\n- a (3): b\n", "line 2: criteria must be below a heading: write '## Criteria'"),
        ("{response}\n# Criteria\n- errors: b\n", "line 3: reward/errors is the suite's own"),
        ("{response}" + "x" * 2**20, "it has 1,048,586 characters"),
    ],
)
def test_a_rubric_that_cannot_be_meant_is_refused_with_its_line(text, reason):
    with pytest.raises(RubricError) as raised:
        read_rubric(text)
    assert reason in str(raised.value)


def test_a_rubric_of_another_editor_has_the_same_criteria(tmp_path):
    text = "## Criteria\n- right (3): Is it?\n- polite: Is it?\n\n{response}\n"
    (tmp_path / "rubric.md").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert read_rubric(read_file(tmp_path / "rubric.md")).weights == {"right": 3.0, "polite": 1.0}


def test_a_rubric_may_hold_lists_and_braces_of_its_own():
    text = (
        "- a list\n\\boxed{response} {x} {answer} {response}\n## Criteria\n- a (weight 2): b\n  c\n* d: e\n## End\n- f"
    )
    assert read_rubric(text).weights == {"a": 2.0, "d": 1.0}


def test_a_long_text_is_cut_in_the_middle_with_a_mark():
    assert make_harmless("a" * 60 + "b" * 60, 100) == "a" * 50 + "\n[20 characters are cut out here]\n" + "b" * 50
    assert make_harmless("a" * 100, 100) == "a" * 100
