"""Rows that a Python file makes, such as the prompts that an environment owns."""

from __future__ import annotations

import pytest

from rlhf_suite.config.check.sources import hub_names
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.data.row import Row
from rlhf_suite.data.sources import PROMPTS, locate
from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.preflight.inspections.sources import source_problems
from rlhf_suite.rl.prompts import load_prompts

GAME = """
import random

def rows():
    draw = random.Random(1)
    return [{"input": "play", "label": str(draw.randrange(100))} for _ in range(5)]

class Environment:
    def reset(self, task): ...
    def step(self, turn): ...
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(folder, text: str, name: str = "game.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def prompts_of(file: str):
    data = DataConfig.of("ppo", prompt_dataset=file, input_key="input", label_key="label")
    return load_prompts(data, EvalConfig.of("ppo"), 42, byte_tokenizer())


def test_an_environment_brings_its_own_prompts(tmp_path):
    prompts = prompts_of(written(tmp_path, GAME))
    assert sorted(prompt.label for prompt in prompts.train) == sorted(["17", "72", "97", "8", "32"])
    assert {prompt.text for prompt in prompts.train} == {"play"} and {prompt.source for prompt in prompts.train} == {""}


def test_what_the_rows_are_is_part_of_the_fingerprint_of_a_run_not_the_text_of_the_file(tmp_path):
    first, same, other = (
        prompts_of(written(tmp_path, text, f"{name}.py")).contents_digest
        for name, text in (("a", GAME), ("b", GAME + "# a remark"), ("c", GAME.replace("range(5)", "range(6)")))
    )
    assert first == same != other


def test_rows_may_be_a_list_and_those_that_are_none_are_told_apart(tmp_path):
    located = locate(written(tmp_path, "rows = [{'input': 'a'}, 3]"), "train", PROMPTS)
    good, bad = located.rows()
    assert isinstance(good, Row) and good.where.endswith("game.py:1") and located.num_rows() == 2
    assert (bad.where, bad.reason) == (good.where[:-1] + "2", "not a dict whose keys are the names of columns")


def test_an_error_in_the_file_names_its_line(tmp_path):
    with pytest.raises(UserError, match=r"data.prompt_dataset=.*game.py: .* game.py:2: ZeroDivisionError"):
        locate(written(tmp_path, "def rows():\n    return 1 / 0"), "train", PROMPTS)


def test_a_file_without_rows_is_refused_without_being_run(tmp_path):
    key = "data.prompt_dataset"
    (problem,) = source_problems(key, written(tmp_path, "raise SystemExit\nrow = []"), {})
    assert problem.what.endswith("has no rows") and "define rows()" in problem.fix
    (problem,) = source_problems(key, "gone.py", {})
    assert "the file gone.py does not exist" in problem.what
    (problem,) = source_problems(key, written(tmp_path, "def rows("), {})
    assert "game.py:1: " in problem.what
    assert [*source_problems(key, written(tmp_path, GAME), {})] == [] == hub_names("gone.py")
