"""What a call in Python asks for: words, files of rows and functions, and all mistakes at once."""

from __future__ import annotations

import json
import linecache
from pathlib import Path

import pytest

import rlhf_suite as rs
from rlhf_suite.api.code import name_function
from rlhf_suite.api.rows import name_rows
from rlhf_suite.api.settings import ask, with_files
from rlhf_suite.api.words import words_of


def score(row, config):
    return 1.0


def test_nested_and_dotted_settings_are_the_same_words():
    nested = words_of("sft", [("actor", {"adam": {"lr": 1e-6}}), ("train", {"max_steps": 3})])
    assert nested == words_of("sft", [("actor.adam.lr", 1e-6), ("train.max_steps", 3)])
    assert nested == ["task=sft", "actor.adam.lr=1e-06", "train.max_steps=3"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("a,b", '"a,b"'),
        ([1, "x"], '[1,"x"]'),
        (Path("/a b"), '"/a b"'),
        (("y",), '["y"]'),
    ],
)
def test_a_value_is_read_back_unchanged(value, text):
    assert words_of("sft", [("data.dataset", value)]) == ["task=sft", f"data.dataset={text}"]


def test_a_text_with_a_comma_is_no_sweep():
    asked = ask("sft", {"data": {"input_template": "a,b {}"}})
    assert not asked.checked.is_sweep and asked.checked.config.data.input_template == "a,b {}"


def test_presets_are_not_quoted():
    assert words_of("ppo", [("experiment", "grpo"), ("algo/advantage", "rloo")]) == [
        "task=ppo",
        "experiment=grpo",
        "algo/advantage=rloo",
    ]


@pytest.mark.parametrize(
    ("task", "name", "flag"),
    [
        ("sft", "data", "data.dataset"),
        ("ppo", "data", "data.prompt_dataset"),
        ("dpo", "loss", "algo.loss"),
        ("ppo", "loss", "actor.policy_loss_type"),
        ("serve_rm", "model", "reward.model_name_or_path"),
        ("ppo", "estimator", "algo.advantage.estimator"),
    ],
)
def test_a_short_name_is_a_flag_of_the_task(task, name, flag):
    assert with_files(task, {name: "x"}) == [(flag, "x")]


def test_a_function_is_a_rule_and_a_text_is_a_preset():
    assert with_files("ppo", {"reward": "exact_match"}) == [("reward", "exact_match")]
    assert with_files("ppo", {"reward": score}) == [("reward.rule", f"{Path(__file__).resolve()}:score")]
    assert with_files("ppo", {"reward": "own.py:score"}) == [("reward.rule", "own.py:score")]


def test_mistakes_are_data_and_the_text_is_that_of_the_console():
    problems = rs.check("sft", actor={"adam": {"lr": -1}}, train={"max_stepz": 3})
    assert [problem.key for problem in problems] == ["train.max_stepz", "actor.adam.lr"]
    with pytest.raises(rs.ConfigurationError, match="2 problems in the configuration") as refused:
        rs.run("sft", actor={"adam": {"lr": -1}}, train={"max_stepz": 3})
    assert refused.value.problems == problems


def test_what_is_not_one_run_is_refused():
    with pytest.raises(rs.ConfigurationError, match="chat reads what you type"):
        rs.run("chat", model="builtin:tiny")
    with pytest.raises(rs.ConfigurationError, match=r"rs\.run makes one run"):
        rs.run("sft", **{"hydra/launcher": "slurm"})


def test_a_good_call_has_no_problems(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rs.check("sft") == [] and rs.check("ppo", reward=score) == []


def test_a_file_that_was_mended_is_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (problem,) = rs.check("sft", demo="sft", model="model")
    assert problem.key == "actor.model_name_or_path"
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert problem not in rs.check("sft", demo="sft", model="model")


def test_equal_rows_are_one_file(tmp_path):
    rows = [{"input": "a", "output": "é"}]
    file = name_rows("data.dataset", rows, tmp_path)
    assert file == name_rows("data.dataset", iter(rows), tmp_path) != name_rows("data.dataset", rows * 2, tmp_path)
    assert [json.loads(line) for line in Path(file).read_text().splitlines()] == rows
    assert len([*tmp_path.iterdir()]) == 2


CELL = """
import re
from math import tau as turn
LIMIT = 4
table = load("all")
rs.run("ppo")

def helper(text):
    return len(re.findall("x", text))

def score(row, config):
    return helper(row.response) / LIMIT

def lost(row, config):
    return table[row.response]

class Environment:
    def reset(self, task):
        return helper(task.text)
"""


def define(name: str, *cells: str):
    """Return a function of a notebook's cells, as IPython defines it."""
    space = {"__name__": "__main__", "load": lambda _: {}, "rs": type("RS", (), {"run": lambda *_: None})}
    for number, cell in enumerate(cells or (CELL,), 123):
        file = f"/tmp/ipykernel_1/{number}.py"
        linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
        exec(compile(cell, file, "exec"), space)
    return space[name]


def test_the_definitions_of_a_cell_are_written_and_its_runs_are_not(tmp_path):
    file, _, name = name_function("reward.rule", define("score"), tmp_path).rpartition(":")
    written = Path(file).read_text()
    assert "rs.run" not in written and "table" not in written.partition("def lost")[0] and "LIMIT = 4" in written
    space: dict = {}
    exec(compile(written, file, "exec"), space)
    assert space[name](type("Row", (), {"response": "axx"}), None) == 0.5


FIRST = """
import json
import os.path as places
from math import tau as turn
GOAL, limit = 0.5, int("4")
seen = list()
class Base:
    goal = GOAL
    doubled = goal * 2
    def __init__(self):
        self.times = 3
def helper(text):
    return json.loads(text) + turn * 0 + limit
"""
SECOND = """
from __future__ import annotations
class Reward(Base):
    def of(self, row: Row):
        return helper(row.response) * self.doubled * self.times * len(places.join("a", "b"))
def score(row, config):
    return Reward().of(row)
def broken(row, config):
    return remembers(row)
def remembers(row):
    return seen.append(row)
"""


def test_what_a_cell_needs_of_other_cells_is_written_with_it(tmp_path):
    file, _, name = name_function("reward.rule", define("score", FIRST, SECOND), tmp_path).rpartition(":")
    space: dict = {}
    exec(compile(Path(file).read_text(), file, "exec"), space)
    assert space[name](type("Row", (), {"response": "6"}), None) == (6 + 4) * 1.0 * 3 * 3
    with pytest.raises(rs.UserError, match="broken needs seen, and no import"):
        name_function("reward.rule", define("broken", FIRST, SECOND), tmp_path)


def test_a_class_of_a_cell_is_named_by_its_file_and_an_environment_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = define("Environment")
    assert name_function("train.callbacks", given, tmp_path).endswith(".py:Environment")
    ((_, file),) = with_files("ppo", {"train": {"agent_func_path": given}})
    assert file.endswith(".py") and "class Environment:" in Path(file).read_text()
    with pytest.raises(rs.UserError, match="the source of int is not known"):
        name_function("reward.rule", int, tmp_path)


def test_a_function_that_reads_what_is_not_written_is_refused(tmp_path):
    with pytest.raises(rs.UserError, match=r"lost needs table, and no import, .* of 123\.py or of another cell"):
        name_function("reward.rule", define("lost"), tmp_path)
