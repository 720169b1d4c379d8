"""Every metric is declared, with which way it is better, and nothing guesses that from a name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rlhf_suite.config.declarations.metrics import (
    FAMILIES,
    HIGHER,
    LOWER,
    METRICS,
    direction_of,
    is_known,
    is_share,
    metric_of,
)
from rlhf_suite.config.declarations.runs import TASKS
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.tracking.console import HEADLINES

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "rlhf_suite"


def test_every_metric_of_an_evaluation_and_every_headline_is_declared():
    assert {name for task in TRAINED for name in TASKS[task].evaluated} | {*HEADLINES} <= {*METRICS}


@pytest.mark.notices(
    "the direction of a metric is looked up by the name of its set",
    "config/declarations/metrics.py",
    'last = name.rpartition("/")[2]\n    if PASS',
    'last = name.split("/")[1]\n    if PASS',
)
@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("eval/gpt_loss", LOWER),
        ("eval/glossary/acc", HIGHER),
        ("eval/kl", None),
        ("eval/kl/gpt_loss", LOWER),
        ("eval/calls_2/pass16", HIGHER),
        ("eval/pass1_stderr", None),
        ("eval/lossless", None),
        ("reward/loss_of_a_user", None),
        ("agent/score", None),
        ("timing/loss", None),
    ],
)
def test_the_direction_is_that_of_the_metric_not_of_its_set(metric, direction):
    assert direction_of(metric) == direction


NAMED = re.compile(r"(train|eval|rollout|agent|async|mismatch|correction|sync|perf|loop)/[a-z]\w*")


def test_every_metric_that_a_source_names_is_declared():
    found = set[str]()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if (
                id(node) not in parts
                and isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and NAMED.fullmatch(node.value)
            ):
                found.add(node.value)
    assert "async/overtaken" in found
    assert {name for name in found if not is_known(name)} == {"train/engine_gap"}, (
        "which a step logs under another name"
    )


def test_a_name_in_a_section_of_the_user_means_nothing_else():
    assert is_known("agent/anything") and metric_of("agent/score") is None
    assert metric_of("reward/errors") is METRICS["reward/errors"] and metric_of("reward/judge/errors") is None
    assert metric_of("rollout/reward_std") is not metric_of("eval/reward_std")
    assert not is_known("train/no_such_metric")
    assert is_share("train/sums/truncated") and is_share("eval/pass4") and not is_share("eval/loss")
    with_names = ("eval/", "reward/", "agent/", "rollout/", "timing/", "train/teacher_kl/")
    assert all(name.startswith(with_names) for name in FAMILIES)


def test_no_source_guesses_by_a_part_of_a_name():
    guess = re.compile(r"""["'](loss|acc|kl|reward)["'] in \w|includes\(["'](loss|acc|kl|reward)""")
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js")]
    assert [str(file) for file in files if guess.search(file.read_text())] == []
