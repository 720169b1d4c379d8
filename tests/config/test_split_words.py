"""Overrides that the shell took apart, and texts that mean no value: one problem each, which says how to write it."""

from __future__ import annotations

import re

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.split_words import join_words
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.preflight.jobs import preflight

SPACES = "there are spaces around its equals sign"
OTHERS = ["task=sft", "train.seed=3"]


@pytest.mark.parametrize(
    ("words", "key", "what", "fix"),
    [
        (["actor.adam.lr", "=", "1e-3"], "actor.adam.lr", SPACES, "write actor.adam.lr=1e-3"),
        (["actor.adam.lr=", "1e-3"], "actor.adam.lr", SPACES, "write actor.adam.lr=1e-3"),
        (["actor.adam.lr", "=1e-3"], "actor.adam.lr", SPACES, "write actor.adam.lr=1e-3"),
        (["actor.adam.lr = 1e-3"], "actor.adam.lr", SPACES, "write actor.adam.lr=1e-3"),
        (["--actor.adam.lr", "=", "1e-3"], "actor.adam.lr", SPACES, "write actor.adam.lr=1e-3"),
        (["experiment", "=", "grpo"], "experiment", SPACES, "write experiment=grpo"),
        (["train.max_steps", "=", "-1"], "train.max_steps", SPACES, "write train.max_steps=-1"),
        (["actor.adam.lr", "1e-3"], "actor.adam.lr", "expected key=value", "write actor.adam.lr=1e-3"),
        (["ds", "zero2"], "ds", "expected key=value", "write ds=zero2"),
        (["=", "3"], "=3", "there is no flag before the equals sign", "write <flag>=3"),
        (["=3"], "=3", "there is no flag before the equals sign", "write <flag>=3"),
        (
            ["actor.adam.lr", "="],
            "actor.adam.lr",
            "there is a space before its equals sign, and no value after it",
            "write actor.adam.lr=<value>",
        ),
        (
            ["actor.adam.betas=[0.9,", "0.95]"],
            "actor.adam.betas",
            "'0.95]' after it is not key=value",
            "if it belongs to the value, write 'actor.adam.betas=[0.9, 0.95]'; if not, remove it",
        ),
        (
            ["data.input_template=User:", "{}", "Answer:"],
            "data.input_template",
            "'{} Answer:' after it is not key=value",
            "if it belongs to the value, write 'data.input_template=User: {} Answer:'; if not, remove it",
        ),
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_an_override_in_pieces_is_one_problem(words, key, what, fix, is_last):
    (problem,) = parse([*OTHERS, *words] if is_last else [OTHERS[0], *words, OTHERS[1]]).problems
    assert (problem.key, problem.what, problem.fix) == (key, what, fix)


@pytest.mark.parametrize(
    "words",
    [
        ["task=ppo", "ds=zero2", "data.dataset=a=b"],
        ["--config", "recipe.yaml", "scale=tiny"],
        ["task=sft", "--cfg", "job"],
        ["--actor.adam.lr", "1e-3", "--packing_samples"],
        ["data.input_key=", "task=sft"],
        ["data.input_template= {}"],
        ["~train.seed", "+mine=a", "-m"],
    ],
)
def test_whole_words_stay_as_they_are(words):
    assert join_words(words) == (words, [])


def test_help_takes_words_without_an_equals_sign():
    assert parse(["--help", "task=sft", "actor.adam", "train"]).problems == []


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("nothing", ["None", "none"])
def test_none_is_one_problem_for_every_flag_whose_remedy_names_a_value(task, nothing):
    """None is what other programs call null: a remedy with None in it, such as one to download it, misleads."""
    others = {"task"} | ({"ckpt.best_metric_key"} if nothing == "none" else set())  # there it is a value
    keys = [key for key in flags_of(task) if key not in others]
    problems = preflight(parse([f"task={task}", *(f"{key}={nothing}" for key in keys)])).problems
    assert sorted(each.key for each in problems if each.key in keys) == sorted(keys)
    for problem in problems:
        assert problem.key not in keys or re.search(rf"\b{re.escape(problem.key)}=[^ N]", problem.fix), problem


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("eval.dataset=None", "write eval.dataset=null"),
        ("algo.kl.target=None", "write algo.kl.target=null, or algo.kl.target=<float>"),
        ("algo.kl.target=", "write algo.kl.target=null, or algo.kl.target=<float>"),
        ("train.batch_size=None", "write train.batch_size=128"),
        ("actor.freeze=None", "write actor.freeze=[]"),
        ("train.batch_size=1e3", "write train.batch_size=1000"),
        ("train.batch_size=1,000", "write train.batch_size=1000 for one number; a sweep needs -m"),
        ("actor.lr_warmup_ratio=3%", "write actor.lr_warmup_ratio=0.03"),
        ('train.batch_size="1 000"', "write train.batch_size=1000"),
    ],
)
def test_a_value_that_means_another_one_has_that_as_its_remedy(word, fix):
    found = preflight(parse(["task=ppo", word])).problems
    assert [each.fix for each in found if each.key == word.partition("=")[0]] == [fix]


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("task=grpo", "write experiment=grpo"),
        ("task=DAPO", "write experiment=dapo"),
        ("task=dr-grpo", "write experiment=dr_grpo"),
        ("task=ipo", "write task=dpo algo.loss=ipo"),
        ("task=gae", "write task=ppo algo.advantage.estimator=gae"),
        ("experiment=sft", "write task=sft"),
    ],
)
def test_an_algorithm_that_was_taken_for_a_task_has_its_flag_as_the_remedy(word, fix):
    (problem,) = [each for each in preflight(parse([word])).problems if each.key == word.partition("=")[0]]
    assert problem.fix == fix
