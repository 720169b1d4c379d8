"""Reward files that were written for OpenRLHF run unchanged, without OpenRLHF."""

from __future__ import annotations

import pytest

from rlhf_suite.rewards.base import Sample, Scored
from rlhf_suite.rewards.file import make_scorer

GRADES = """
import torch
from openrlhf.utils import extract_boxed_answer, grade_answer
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)

def reward_func(queries, prompts, labels, **kwargs):
    from openrlhf.utils.math_utils import grade_answer as late
    assert late is grade_answer
    answers = [extract_boxed_answer(query[len(prompt):]) for query, prompt in zip(queries, prompts)]
    rewards = torch.tensor([float(grade_answer(*pair)) for pair in zip(answers, labels)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards.mean()}}
"""


def rows(*pairs: tuple[str, str]) -> list[Sample]:
    return [Sample("?" + answer, "?", answer, label, "default") for answer, label in pairs]


def test_a_file_that_grades_answers_with_functions_of_openrlhf(tmp_path):
    (tmp_path / "grades.py").write_text(GRADES)
    score = make_scorer(str(tmp_path / "grades.py"))
    given = [("so \\boxed{\\frac{1}{2}}", "0.5"), ("\\boxed{3}", "4"), ("3", "3"), ("\\boxed{blue}", "blue")]
    expected = [1.0, 0.0, 0.0, 1.0]
    mean = pytest.approx(0.5)
    assert score(rows(*given)) == [Scored(value, value, {"accuracy": mean}) for value in expected]


def test_a_file_that_returns_the_rewards_alone(tmp_path):
    text = "import torch\ndef reward_func(queries, prompts, labels):\n    return torch.ones(len(queries))\n"
    (tmp_path / "ones.py").write_text(text)
    assert make_scorer(str(tmp_path / "ones.py"))(rows(("a", "b"))) == [Scored(1.0, 1.0)]


def test_a_module_of_openrlhf_that_has_no_stand_in_is_not_there(tmp_path):
    (tmp_path / "models.py").write_text("from openrlhf.models import Actor\n")
    with pytest.raises(ModuleNotFoundError, match=r"openrlhf\.models"):
        make_scorer(str(tmp_path / "models.py"))
