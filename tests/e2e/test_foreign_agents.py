"""RL runs with agents of others: files of four other libraries as they are, an MCP server and a server of OpenEnv, each
for some of the prompts of one run; and a program with the client of OpenAI."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import jobs
import numpy as np
import pytest

from foreign_agents import BASES, FILES
from openenv_server import OpenEnvServer
from rlhf_suite.data.trajectory import MODEL

ROOT = Path(__file__).parents[2]
ONE_OF_SIX = """
import sys
from pathlib import Path

from rlhf_suite.agents.build import make_agent
from rlhf_suite.config.declarations.agent import AgentConfig, agents_of

HERE = Path(__file__).parent
ENVIRONMENT, TOOLS = AgentConfig(kind="environment"), AgentConfig(kind="tools")
SERVER = AgentConfig(kind="environment", server_url="SERVER_URL")
TOOLS.tools = [f"mcp:{sys.executable} {HERE / 'mcp_server.py'}"]
AGENTS = {path.stem.removeprefix("for_"): agents_of(ENVIRONMENT, str(path))[0] for path in HERE.glob("for_*.py")}
AGENTS |= {"mcp": agents_of(TOOLS)[0], "openenv": agents_of(SERVER)[0]}
MAKERS = {name: make_agent(agent, must_score=False).make for name, agent in AGENTS.items()}

class Environment:
    def take_session(self, session):
        self.session = session

    async def reset(self, task):
        self.inner = MAKERS[task.datasource]()
        if hasattr(self.inner, "take_session"):
            self.inner.take_session(self.session)
        return await self.inner.reset(task)

    async def step(self, turn):
        return await self.inner.step(turn)

    async def close(self):
        await self.inner.close()
"""
# What the environment of each datasource adds to the conversation.
SAYS = {
    "openrlhf": "Human: no",
    "trl": "The counter begins at 0.",
    "skyrl": "begin now",
    "gymnasium": "You are at 0.",
    "mcp": "",  # its tools are in the prompt where a template shows them
    "openenv": "Between 1 and 9",
}


def common_words(model: Path, rows: Path) -> list[str]:
    """Three steps of conversations, two samples of each prompt."""
    small = [word for word in jobs.SMALL if not word.startswith(("eval.", "data.", "rollout.", "train."))]
    return [
        *small,
        *(f"actor.model_name_or_path={model}", "algo.advantage.estimator=reinforce_baseline", "algo.kl.init_coef=0"),
        *(f"data.prompt_dataset={rows}", "data.label_key=label", "data.input_key=messages"),
        *("data.apply_chat_template=true", f"data.tokenizer_chat_template={ROOT}/experiments/agents/tools.jinja"),
        *("rollout.n_samples_per_prompt=2", "train.max_steps=3", "eval.dataset=null", "eval.steps=-1"),
    ]


@pytest.fixture(scope="module")
def server():
    with closing(OpenEnvServer()) as server:
        yield server


@pytest.fixture(scope="module")
def words(runs, warm, server):
    home = runs / "foreign_agents"
    home.mkdir(parents=True)
    for name, text in FILES.items():
        (home / f"for_{name}.py").write_text(text)
    (home / "bases.py").write_text(BASES)
    (home / "one_of_six.py").write_text(ONE_OF_SIX.replace("SERVER_URL", server.url))
    shutil.copy(ROOT / "tests" / "agents" / "mcp_server.py", home)
    rows = [
        {"messages": [{"role": "user", "content": "321"}], "label": "123", "datasource": name}
        for _ in range(6)
        for name in SAYS
    ]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *common_words(warm, home / "rows.jsonl"),
        *("agent.kind=environment", f"train.agent_func_path={home}/one_of_six.py", "agent.max_turns=3"),
        *("reward.rule=exact_match", "data.max_len=1024", "rollout.max_new_tokens=100"),
        *("rollout.batch_size=12", "rollout.micro_batch_size=6", "train.batch_size=12", "train.micro_batch_size=6"),
    ]


@pytest.fixture(scope="module")
def folder(runs, words):
    folder = runs / "foreign_agents" / "run"
    jobs.run(folder, words)
    return folder


@pytest.fixture(scope="module")
def samples(folder):
    return [sample for step in (1, 2, 3) for sample in jobs.rollout(folder, step)]


@pytest.mark.proof
def test_files_of_other_libraries_and_servers_train(folder, server, samples, record_property):
    steps = jobs.train_rows(folder)
    assert len(steps) == 3 and all(np.isfinite(row["train/policy_loss"]) for row in steps)
    record_property("kinds of agents in one run", len(SAYS))
    record_property("most turns of an episode", float(max(sample["agent/turns"] for sample in samples)))
    assert len(samples) == 72
    for name, text in SAYS.items():
        mine = [sample for sample in samples if sample["datasource"] == name]
        assert mine and any(text in sample["reward_query"] for sample in mine), name
        assert all(np.isfinite(sample["reward"]) for sample in mine)
    assert {sample["agent/tool_errors"] for sample in samples if sample["datasource"] == "mcp"} == {0.0}
    assert max(sample["agent/turns"] for sample in samples) > 1
    assert {sample["reward/steps"] is None for sample in samples if sample["datasource"] == "openrlhf"} == {False}
    assert len(server.sessions) == 12, "an episode each"


@pytest.mark.proof
def test_the_same_agents_train_the_same_in_workers(runs, words, folder):
    """Each worker starts MCP servers and connections of its own, and imports the files by itself."""
    mine = runs / "foreign_agents" / "workers"
    jobs.run(mine, [*words, "agent.num_workers=2"])
    assert (mine / "logs" / "episode-worker-1.log").exists()
    for step in (1, 2, 3):
        assert jobs.rollout(mine, step) == jobs.rollout(folder, step)
    assert jobs.digest(mine) == jobs.digest(folder)


@pytest.mark.proof
def test_engine_and_trainer_agree_on_every_turn(samples, record_property):
    gaps = []
    for sample in samples:
        own = np.array(sample["owner"]) == MODEL
        turns = np.cumsum(np.diff(own.astype(int), prepend=0) == 1)
        later = own & (turns > 1)
        gaps += np.abs(np.array(sample["engine_log_probs"]) - np.array(sample["old_log_probs"]))[later].tolist()
    record_property("mean difference of log-probs", float(np.mean(gaps)))
    assert len(gaps) > 100 and np.mean(gaps) < 1e-6


@pytest.mark.proof
def test_a_program_with_the_client_of_openai_trains(runs, warm):
    rows, folder = runs / "questions.jsonl", runs / "chat_client"
    row = {"messages": [{"role": "user", "content": "reverse 321 ="}], "label": "123"}
    rows.write_text(12 * (json.dumps(row) + "\n"))
    words = [
        *common_words(warm, rows),
        *("agent.kind=endpoint", f"train.agent_func_path={ROOT}/experiments/agents/chat_client/agent.py"),
        *("reward.rule=null", "data.max_len=256", "rollout.max_new_tokens=60", "rollout.batch_size=4"),
        *("rollout.micro_batch_size=4", "train.batch_size=8", "train.micro_batch_size=4"),
    ]
    jobs.run(folder, words)
    steps = jobs.train_rows(folder)
    assert len(steps) == 3 and all(np.isfinite(row["train/policy_loss"]) for row in steps)
    samples = [sample for step in (1, 2, 3) for sample in jobs.rollout(folder, step)]
    assert len(samples) == 24 and all(sample["reward"] == float(sample["response"] == "123") for sample in samples)
