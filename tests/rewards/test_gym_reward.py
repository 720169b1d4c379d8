"""Tasks of reasoning-gym: their rows, and their own scoring of answers in a process that gave its rights up."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.sources import DATASET, locate
from rlhf_suite.errors import UserError
from rlhf_suite.rewards.base import RewardFailure, Sample, Scored
from rlhf_suite.rewards.reward_process import IsolatedScorer

pytestmark = pytest.mark.stack

pytest.importorskip("reasoning_gym")
SUMS = "reasoning_gym:chain_sum/size:3/seed:1/max_terms:2/min_digits:2"


def load(source):
    return [row.values for row in locate(source, "train", DATASET).rows()]


def scored(label, response):
    return Sample(query=response, prompt="", response=response, label=label, datasource="x")


@pytest.fixture(scope="module")
def rewarder(tmp_path_factory):
    os.environ["RLHF_SUITE_TEST_KEY"] = "secret"
    one = IsolatedScorer(
        RewardConfig.of("generate", rule="reasoning_gym", timeout_s=20), tmp_path_factory.mktemp("logs") / "reward.log"
    )
    yield one
    one.close()
    del os.environ["RLHF_SUITE_TEST_KEY"]


def test_settings_reach_the_task_and_make_the_same_rows_every_time():
    rows = load(SUMS)
    assert len(rows) == 3 and rows == load(SUMS) != load(SUMS.replace("seed:1", "seed:2"))
    for row in rows:
        left, sign, right = row["input"].split(":")[1].removesuffix("=").split()
        assert int(row["output"]) == int(left) + int(right) * (1 if sign == "+" else -1)
        assert int(left) >= 10 and row["datasource"] == "chain_sum"
        assert ast.literal_eval(row["label"])["entry"]["answer"] == row["output"]


def test_tuples_and_foreign_numbers_of_an_entry_survive_as_text(rewarder):
    for task in ("arc_agi", "knights_knaves"):
        (row,) = load(f"reasoning_gym:{task}/size:1")
        assert rewarder.score([scored(row["label"], row["output"])]) == [Scored(1, 1, {"unreadable": 0})]


def test_an_answer_is_scored_by_its_task_with_the_rows_settings(rewarder):
    row = load(SUMS)[0]
    given = [row["output"], f"so <answer>0</answer>, no: <answer> {row['output']}\n</answer>.", "no idea", ""]
    outcomes = rewarder.score([scored(row["label"], response) for response in given])
    assert [outcome.score for outcome in outcomes] == [1, 1, 0, 0]


def test_an_answer_that_cannot_be_read_is_wrong_and_a_foreign_label_is_an_error(rewarder):
    (row,) = load("reasoning_gym:simple_integration/size:1")
    wrong, foreign = rewarder.score([scored(row["label"], "((("), scored("42", "42")])
    assert wrong.score < 1
    assert (
        isinstance(foreign, RewardFailure) and "no entry of reasoning-gym; take data.prompt_dataset" in foreign.reason
    )


def test_an_answer_that_is_run_as_python_reaches_neither_keys_nor_files(rewarder, tmp_path):
    """spiral_matrix gives 0.1 to an answer that evaluates to the right one; here it does if a look around succeeds."""
    (row,) = load("reasoning_gym:spiral_matrix/size:1")
    right = row["output"].split()
    secret = tmp_path / "secret"
    secret.write_text("x")
    peeks = {
        "2 + 2 == 4": 1,
        "'RLHF_SUITE_TEST_KEY' in __import__('os').environ": 0,
        f"open({str(secret)!r}).read()": 0,
        f"__import__('os').system('cat {secret}') == 0": 0,
        f"__import__('pathlib').Path({str(tmp_path / 'new')!r}).write_text('x')": 0,
    }
    outcomes = rewarder.score([scored(row["label"], f"[*{right}][:None if {look} else 0]") for look in peeks])
    assert [outcome.score for outcome in outcomes] == [0.1 * passed for passed in peeks.values()]
    assert not Path(tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "chain_sums",
            r"data\.dataset=reasoning_gym:chain_sums: .*no task 'chain_sums'; did you mean reasoning_gym:cha",
        ),
        ("chain_sum/terms:2", r"chain_sum has no setting terms; it has min_terms, max_terms, "),
        ("chain_sum/seed=2", r"'seed=2' is not a setting; write reasoning_gym:chain_sum/<setting>:<value>"),
        ("chain_sum/min_terms:9", "chain_sum does not accept these settings: max_terms must be >= min_terms"),
    ],
)
def test_a_mistake_in_the_name_says_what_there_is(source, message):
    with pytest.raises(UserError, match=message):
        load(f"reasoning_gym:{source}")
