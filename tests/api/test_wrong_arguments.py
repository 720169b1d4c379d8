"""What a call in Python says about a wrong argument: one problem with the flag, the value and a remedy."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
import torch

import rlhf_suite as rs
from rlhf_suite.api.rows import name_rows

ROWS = [{"input": "a", "output": "b"}]


def score(row, config):
    return 1.0


class Scorer:
    def __call__(self, row, config):
        return 1.0

    def of(self, row, config):
        return 1.0


class Watch:
    def on_step(self, step, metrics, samples):
        pass


def inner():
    def within(row, config):
        return 0.0

    return within


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


WRONG = [
    ("task=sft", {}, "task", "'task=sft' is not the name of a task", "write only the name: rs.run('sft', ...)"),
    (["sft"], {}, "task", "['sft'] is not the name of a task", "choose one of"),
    (3, {}, "task", "3 is not the name of a task", "choose one of"),
    ("sft", {"data": 3}, "data.dataset", "a value of type int has no rows", "give a list of dicts, a table"),
    ("sft", {"eval": {"dataset": 3}}, "eval.dataset", "a value of type int has no rows", "give a list of dicts"),
    ("sft", {"data": b"a"}, "data.dataset", "a value of type bytes has no rows", "or a path"),
    ("sft", {"data": score}, "data.dataset", "a value of type function has no rows", "or a path"),
    ("sft", {"data": []}, "data.dataset", "there are no rows", "give a list of dicts"),
    ("sft", {"data": ["a.jsonl"]}, "data.dataset", "row 1 is the text 'a.jsonl'", "'a.jsonl,b.parquet'"),
    ("sft", {"data": [[1]]}, "data.dataset", "row 1 is a list", "give each row as a dict"),
    ("sft", {"data": {"input": ["a"]}}, "data.dataset", "a dict with the columns input has no rows", "a table"),
    ("sft", {"data": {"train": pandas.DataFrame(ROWS)}}, "data.dataset", "several data sets (train)", "data['train']"),
    ("sft", {"data": [{"input": math.nan}]}, "data.dataset", "row 1: column input has NaN or infinity", "write None"),
    ("sft", {"data": [{"input": {1}}]}, "data.dataset", "row 1: column input has a set", "give texts, numbers"),
    ("sft", {"data": [{1: "a"}]}, "data.dataset", "row 1 has a column 1", "give texts as the names"),
    ("sft", {"data": [{"input": "\ud800"}]}, "data.dataset", "half of a surrogate pair", "give texts that UTF-8 has"),
    ("sft", {"data": pandas.Series([1])}, "data.dataset", "the rows of a Series cannot be read", "give a table"),
    ("sft", {"data": pandas.DataFrame({"a": [1, "b"]})}, "data.dataset", "cannot be read", "one type each"),
    ("sft", {"model": torch.nn.Linear(2, 2)}, "actor.model_name_or_path", "is not the name or the", "save_pretrained"),
    ("sft", {"model": torch.nn.Linear}, "actor.model_name_or_path", "the class Linear is not", "give a name"),
    ("sft", {"model": 3}, "actor.model_name_or_path", "3 is not the name or the folder of a model", "a folder"),
    ("sft", {"config_dir": 3}, "config_dir", "3 is not a path", "give a text or a pathlib.Path"),
    ("sft", {"config": object()}, "config", "an object of type object is not a path", "give a text"),
    ("sft", {"on_step": 3}, "on_step", "3 is not a function", "give a function (step, metrics, samples)"),
    ("sft", {"on_step": Watch}, "on_step", "the class Watch is not a function", "classes are callbacks="),
    ("sft", {"callbacks": [Watch()]}, "train.callbacks", "an object of type Watch is neither", "give the class Watch"),
    ("sft", {"on_step": Watch().on_step}, "train.callbacks", "is a method of an object", "define a function"),
    ("ppo", {"reward": lambda row, config: 1.0}, "reward.rule", "is a lambda", "define it with def"),
    ("ppo", {"reward": inner()}, "reward.rule", "within a function or class", "define it with def"),
    ("ppo", {"reward": Scorer().of}, "reward.rule", "Scorer.of is a method of an object", "define a function"),
    ("ppo", {"reward": Scorer()}, "reward.rule", "an object of type Scorer is neither a function", "that calls it"),
    ("ppo", {"reward": partial(score, config=None)}, "reward.rule", "an object of type partial", "that calls it"),
    ("ppo", {"reward": len}, "reward.rule", "the source of len is not known", "define it in a file or a cell"),
    ("ppo", {"reward": "own.py:f"}, "reward.rule", "the file own.py does not exist", "correct the path"),
    ("ppo", {"estimator": "own.py:f"}, "algo.advantage.estimator", "the file own.py does not exist", "correct"),
    ("ppo", {"agent": Watch()}, "agent.kind", "an object of type Watch is neither", "give the class Watch"),
    ("sft", {"train": {"max_steps": score}}, "train.max_steps", "takes no function or class", "docs/own_code.md"),
    ("sft", {"train.max_steps": {1, 2}}, "train.max_steps", "{1, 2} is not a value of a flag", "give a number"),
    ("sft", {"data.input_key": "a\0"}, "data.input_key", "has a zero byte", "remove it"),
    ("sft", {"data.input_template": "x" * 200_000}, "data.input_template", "has 200", "give config=<file>"),
    ("sft", {"a b": 1}, "a b", "is not the name of a flag", "actor.adam.lr"),
    ("ppo", {"experiment": "grpo,rloo"}, "experiment", "'grpo,rloo' are several presets", "rs.sweep(grid="),
    ("sft", {"actor": {"adam": {"lr": 1e-3}}, "actor.adam.lr": 1e-4}, "actor.adam.lr", "is set twice", "give it once"),
    ("sft", {"data": ROWS, "data.dataset": "x"}, "data.dataset", "is set twice", "give it once; data= sets it too"),
    ("ppo", {"reward": score, "reward.rule": "length"}, "reward.rule", "is set twice", "reward= sets it too"),
    ("sft", {"model": "x", "actor.model_name_or_path": "y"}, "actor.model_name_or_path", "is set twice", "model= sets"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "settings", "key", "what", "fix"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_argument_is_one_problem(task, settings, key, what, fix):
    (problem,) = rs.check(task, **settings)
    assert problem.key == key and what in problem.what and fix in problem.fix
    assert "\n" not in problem.what + problem.fix and len(problem.what) < 300


@pytest.mark.parametrize("call", [rs.run, rs.explain, rs.plan, rs.sweep])
def test_a_flag_that_is_set_twice_is_refused_in_every_call(call):
    with pytest.raises(rs.ConfigurationError, match=r"actor\.adam\.lr: is set twice"):
        call("sft", actor={"adam": {"lr": 1e-3}}, **{"actor.adam.lr": 1e-4})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"grid": [1]}, "grid: [1] is not a dict"),
        ({"grid": "actor.adam.lr"}, "grid: 'actor.adam.lr' is not a dict"),
        ({"grid": {"data": pandas.DataFrame(ROWS)}}, "grid: data=an object of type DataFrame is not a list of values"),
        ({"grid": {"model": [torch.nn.Linear]}}, "actor.model_name_or_path: the class Linear is not"),
        ({"seeds": "3"}, "seeds: '3' is neither a whole number nor a list of such"),
        ({"seeds": 1.5}, "seeds: 1.5 is neither"),
        ({"seeds": True}, "seeds: True is neither"),
        ({"seeds": [1, "a"]}, "seeds: [1, 'a'] is neither"),
        ({"seeds": [1, 1]}, "seeds: [1, 1]: one is there twice"),
    ],
)
def test_a_wrong_grid_or_seed_is_one_problem(settings, said):
    with pytest.raises(rs.ConfigurationError) as refused:
        rs.sweep("sft", **settings)
    assert said in str(refused.value) and len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rs.load(3), "3 is not a folder"),
        (lambda: rs.load_sweep(None), "None is not a folder"),
        (lambda: rs.Run(3), "3 is not a folder"),
        (rs.write_report, "no run is named"),
        (lambda: rs.write_report(3), "3 is not a folder"),
        (lambda: rs.plan("sft", gpu=3), "--gpu 3: is not a text"),
        (lambda: rs.plan("sft", memory="a"), "--memory 'a': is not a number"),
        (lambda: rs.plan("sft", mfu=2, gpu="h100-80"), "--mfu 2: must be above 0 and at most 1"),
        (lambda: rs.run("sft", explain=True), "use rs.explain"),
        (lambda: rs.Adam(lr=-1), "rs.Adam: lr has -1. Give a number of at least 0"),
        (lambda: rs.Adam(lr="a"), "rs.Adam: lr has 'a'"),
        (lambda: rs.Adam(eps=math.nan), "rs.Adam: eps has nan"),
        (lambda: rs.Adam(betas=0.9), "rs.Adam: betas=0.9. Give two numbers"),
        (lambda: rs.Adam(betas=(0.9, 1.0)), "rs.Adam: betas has 1.0. Give a number from 0 to below 1"),
    ],
)
def test_a_wrong_argument_of_other_calls_is_one_sentence(call, said):
    with pytest.raises(rs.UserError) as refused:
        call()
    assert said in str(refused.value)


def test_rows_of_tables_and_numpy_are_those_of_dicts(tmp_path):
    rows = [{"input": "a", "weight": 1.0, "ids": [1, 2]}, {"input": "b", "weight": None, "ids": [3]}]
    file = name_rows("data.dataset", rows, tmp_path)
    arrays = [{**row, "ids": np.array(row["ids"])} for row in rows]
    frame = pandas.DataFrame({"input": ["a", "b"], "weight": [1.0, math.nan], "ids": [[1, 2], [3]]}, index=[7, 9])
    for given in (arrays, frame, pyarrow.Table.from_pylist(rows), pyarrow.Table.from_pylist(rows).to_batches()[0]):
        assert name_rows("data.dataset", given, tmp_path) == file
    assert [json.loads(line) for line in Path(file).read_text().splitlines()] == rows


def test_names_of_the_package_are_public():
    assert sorted(rs.NAMES) == dir(rs) and not any(name.startswith("_") for name in dir(rs))
