"""Whole runs in one process with agents: what their environments say is not trained on, and their rewards are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from plain_run import run, small

from rlhf_suite.config.declarations.agent import AgentSourceConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import ENVIRONMENT, MODEL
from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.run_folders.run_folder import samples_file
from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.stack

CODE = """
from rlhf_suite.agents.base import Start, Step

class Environment:
    async def reset(self, task):
        self.turns, self.label = 0, task.label
        return Start(text="again " + task.text)

    async def step(self, turn):
        self.turns += 1
        if self.turns == 2:
            return Step(reward=len(turn.ids) / 4, done=True, extra={"of_label": float(len(self.label))})
        return Step(text=" no ", reward=0.5)

    async def close(self): ...
"""
FLAGS = {
    "agent__kind": "environment",
    "agent__max_turns": 3,
    "reward__rule": None,
    "rollout__max_new_tokens": 24,
    "rollout__stop": None,
    "algo__kl__init_coef": 0.0,
    "train__max_epochs": 2,
    "eval__dataset": "builtin:reverse",
    "eval__max_samples": 2,
    "eval__n_samples_per_prompt": 2,
    "eval__steps": 3,
    "eval__max_calls": [1, 0],  # the last one before training allows no call
}


def settings(folder: Path, code: str, **more):
    """Return a run with this environment, of a model that ends its turns with any of 60 tokens."""
    (folder / "environment.py").write_text(code)
    create_tiny(folder / "start")
    file = folder / "start" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [*range(20, 80)]}))
    files = {"train__agent_func_path": str(folder / "environment.py"), "actor__model_name_or_path": f"{folder}/start"}
    return small(**files | FLAGS | more)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """The folder of a run whose environment asks once more."""
    folder = tmp_path_factory.mktemp("agents")
    ranks(1).call(run, folder, settings(folder, CODE))
    return folder


@pytest.fixture(scope="module")
def samples(whole):
    return [row for file in sorted((whole / "rollouts").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.mark.notices(
    "the log-probs of a turn stand one token too late",
    "data/trajectory.py",
    "self._append(ids, MODEL, log_probs, versions)",
    "self._append(ids, MODEL, np.roll(log_probs, 1), versions)",
)
@pytest.mark.notices("rewards of turns are lost", "rl/scoring.py", "Scored(t.reward + turns,", "Scored(t.reward,")
@pytest.mark.notices(
    "the allowed calls of an evaluation hold for training too",
    "agents/environment.py",
    "result = copy(self)",
    "result = self",
)
def test_rewards_are_those_of_the_environment_and_of_its_turns(samples):
    seen = set()
    for row in samples:
        borders = np.flatnonzero(np.diff(np.concatenate([[0], np.array(row["owner"]) == MODEL, [0]])))
        lengths = (borders[1::2] - borders[::2]).tolist()
        seen.add(len(lengths))
        assert row["reward"] == pytest.approx(0.5 + lengths[1] / 4 if len(lengths) == 2 else 0.5)
        assert row["reward/of_label"] == (len(row["label"]) if len(lengths) == 2 else None)
    assert 2 in seen


@pytest.mark.notices(
    "what a tool printed is a part of the answer that rewards see",
    "rl/scoring.py",
    "return t.turns[-1] if ENVIRONMENT in t.owner else t.response_ids",
    "return t.response_ids",
)
def test_what_the_environment_says_has_no_log_prob_and_no_advantage(samples):
    both = [row for row in samples if ENVIRONMENT in row["owner"]]
    assert both, "or this test looks at nothing"
    assert all(" no " in row["reward_query"] and " no " not in row["response"] for row in both)
    for row in both:
        others = np.array(row["owner"]) != MODEL
        assert not np.array(row["engine_log_probs"])[others].any()
        assert not np.array(row["advantages"])[others].any()


def test_log_probs_of_engine_and_trainer_agree_over_all_turns(samples, record_property):
    differences = [
        abs(a - b)
        for row in samples
        for a, b, owner in zip(row["engine_log_probs"], row["old_log_probs"], row["owner"], strict=True)
        if owner == MODEL
    ]
    record_property("mean difference of log-probs", float(np.mean(differences)))
    assert len(differences) > 20 and np.mean(differences) < 1e-6


def test_metrics_of_episodes_are_logged(whole):
    rows = [row for row in read_rows(whole / "metrics.jsonl") if "train/reward" in row]
    assert rows and all(1 <= row["agent/turns"] <= 2 and row["train/reward"] >= 0.5 for row in rows)
    for step, row in enumerate(rows, 1):
        table = pq.read_table(samples_file(whole / "rollouts", step))
        for ending in set(Ending) - {Ending.COMPACTED}:
            assert row[f"agent/ended/{ending.value}"] == table["ending"].to_pylist().count(ending.value)


def test_the_timeline_tells_environments_from_engines(whole):
    rows = [json.loads(line) for line in (whole / "timeline.jsonl").read_text().splitlines()]
    assert {"engines", "environments", "trainer", "driver"} <= {row["who"] for row in rows}


@pytest.mark.notices(
    "an evaluation without calls allows one",
    "rl/evaluation.py",
    "self.sampler.limit_turns(calls + 1)",
    "self.sampler.limit_turns(calls + 2)",
)
@pytest.mark.notices(
    "evaluations by allowed calls draw other random numbers",
    "rl/evaluation.py",
    "samples, settings, (EVALUATION, 0))",
    "samples, settings, (EVALUATION, int(sampler is self.sampler)))",
)
def test_an_evaluation_by_allowed_calls_has_the_same_seeds_and_no_further_turns(whole):
    files = [sorted((whole / "evaluations" / name).glob("*.parquet"))[-1] for name in ("", "calls_0", "calls_1")]
    times = ["turns"]  # which differ from run to run
    usual, none, one = (pq.read_table(file).drop_columns(times).to_pylist() for file in files)
    assert len(usual) == 4 and {row["agent/turns"] for row in none} == {1.0}
    assert one == usual and {row["agent/turns"] for row in one} >= {2.0}
    for first, both in zip(none, one, strict=True):
        assert both["reward_query"].startswith(first["reward_query"])
    first, last = [row for row in read_rows(whole / "metrics.jsonl") if "eval/calls_0/pass1" in row]
    assert (first["step"], last["step"]) == (0, 2)
    assert last["eval/calls_1/pass2"] == last["eval/pass2"] and last["eval/calls_0/pass1"] == 0


def test_an_environment_without_a_reward_ends_the_run(ranks, tmp_path):
    with pytest.raises(AssertionError, match=r"RunError: [24] of [24] .*no step of the environment had a reward"):
        ranks(1).call(run, tmp_path, settings(tmp_path, CODE.replace("reward=", "score=")))


def rows_of(folder: Path, *datasources: str) -> str:
    """Write a file of prompts, of each datasource in turn, and return its path."""
    rows = [{"input": f"say {i}", "label": str(i), "datasource": datasources[i % len(datasources)]} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder / "prompts.jsonl")


def several(folder: Path, datasources: tuple[str, ...], **more):
    """Return a run whose environment plays all rows but those of the datasource chat, which have one turn."""
    flags = {
        "data__prompt_dataset": rows_of(folder, *datasources),
        "agent__sources": {"plain": AgentSourceConfig("single_turn", ["chat"])},
        "reward__rule": "length",
        "eval__dataset": None,
        "eval__steps": -1,
        "eval__max_calls": None,
    }
    return settings(folder, CODE, **flags | more)


def test_rows_have_different_agents(ranks, tmp_path):
    ranks(1).call(run, tmp_path, several(tmp_path, ("chat", "game")))
    rows = [
        row for file in sorted((tmp_path / "rollouts").glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]
    assert {row["datasource"] for row in rows} == {"chat", "game"}
    for row in rows:
        if row["datasource"] == "chat":
            assert ENVIRONMENT not in row["owner"] and row["agent/turns"] == 1 and row["reward/of_label"] is None
        else:
            assert row["agent/turns"] == 1 + (ENVIRONMENT in row["owner"])
    assert any(ENVIRONMENT in row["owner"] for row in rows)


def test_rows_of_one_turn_are_those_of_a_run_without_agents(ranks, tmp_path):
    folders = [tmp_path / "beside", tmp_path / "alone"]
    for folder in folders:
        folder.mkdir()
    ranks(1).call(run, folders[0], several(folders[0], ("chat",)))
    ranks(1).call(run, folders[1], several(folders[1], ("chat",), agent__sources={}, agent__kind="single_turn"))
    beside, alone = ((folder / "model/model.safetensors").read_bytes() for folder in folders)
    assert beside == alone


def said(world, folder: Path, config) -> str:
    with pytest.raises(UserError) as raised:
        run(world, folder, config)
    return str(raised.value)


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        pytest.param(
            {"train__async_queue_size": 1, "algo__advantage__is_correction_level": "token"}, marks=pytest.mark.proof
        ),
    ],
)
def test_an_async_step_that_blocks_all_episodes_ends_the_run(ranks, tmp_path, schedule):
    code = "import time\n" + CODE.replace("self.turns += 1", "time.sleep(86_400)")
    line = 1 + code.splitlines().index("        time.sleep(86_400)")
    config = settings(tmp_path, code, agent__tool_timeout_s=5.0, **schedule)
    (message,) = ranks(1).call(said, tmp_path, config)
    assert f"environment.py:{line} (step) has blocked all episodes for agent.tool_timeout_s=5 s" in message
