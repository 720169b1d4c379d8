"""Which way each metric is better is declared, and nothing guesses it from a name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_suite.config.metrics import DIRECTIONS, HIGHER, LOWER, direction_of
from rlhf_suite.config.runs import TASKS, TrainedRun
from rlhf_suite.tracking.console import HEADLINES

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "rlhf_suite"
TRAINED = [task for task in TASKS.values() if issubclass(task, TrainedRun)]


def test_every_metric_of_an_evaluation_and_every_headline_is_declared():
    assert {name for task in TRAINED for name in task.EVALUATED} | {*HEADLINES} <= {*DIRECTIONS}


@pytest.mark.notices(
    "the direction of a metric is looked up by the name of its set",
    "config/metrics.py",
    'last = metric.rpartition("/")[2]\n    return HIGHER',
    'last = metric.split("/")[1]\n    return HIGHER',
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
    ],
)
def test_the_direction_is_that_of_the_metric_not_of_its_set(metric, direction):
    assert direction_of(metric) == direction


def test_no_source_guesses_by_a_part_of_a_name():
    guess = re.compile(r"""["'](loss|acc|kl|reward)["'] in \w|includes\(["'](loss|acc|kl|reward)""")
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js")]
    assert [str(file) for file in files if guess.search(file.read_text())] == []
