"""One RL run in which every prompt has another agent: files of four other libraries as they are, and an MCP server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jobs
import numpy as np
import pytest

from foreign_agents import BASES, FILES

ROOT = Path(__file__).parents[2]
ONE_OF_FIVE = """
import sys
from pathlib import Path

from rlhf_suite.agents.build import maker
from rlhf_suite.config.agent import AgentConfig

HERE = Path(__file__).parent
ENVIRONMENT, TOOLS = AgentConfig(kind="environment"), AgentConfig(kind="tools")
TOOLS.tools = [f"mcp:{sys.executable} {HERE / 'mcp_server.py'}"]
MAKERS = {path.stem.removeprefix("for_"): maker(ENVIRONMENT, str(path))[0] for path in HERE.glob("for_*.py")}
MAKERS["mcp"] = maker(TOOLS, None)[0]

class Environment:
    async def reset(self, task):
        self.inner = MAKERS[task.datasource]()
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
}


@pytest.fixture(scope="module")
def folder(runs, warm):
    home = runs / "foreign_agents"
    home.mkdir(parents=True)
    for name, text in FILES.items():
        (home / f"for_{name}.py").write_text(text)
    (home / "bases.py").write_text(BASES)
    (home / "one_of_five.py").write_text(ONE_OF_FIVE)
    shutil.copy(ROOT / "tests" / "agents" / "mcp_server.py", home)
    rows = [
        {"messages": [{"role": "user", "content": "321"}], "label": "123", "datasource": name}
        for _ in range(6)
        for name in SAYS
    ]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *(word for word in jobs.SMALL if not word.startswith(("eval.", "data.", "rollout.", "train."))),
        *("agent.kind=environment", f"train.agent_func_path={home}/one_of_five.py", "agent.max_turns=3"),
        *("reward.rule=exact_match", "data.label_key=label", "data.input_key=messages", "data.max_len=1024"),
        *(f"data.prompt_dataset={home}/rows.jsonl", "data.apply_chat_template=true"),
        f"data.tokenizer_chat_template={ROOT}/experiments/agents/tools.jinja",
        *(f"actor.model_name_or_path={warm}", "algo.advantage.estimator=reinforce_baseline", "algo.kl.init_coef=0"),
        *("rollout.batch_size=10", "rollout.n_samples_per_prompt=2", "rollout.micro_batch_size=5"),
        *("train.batch_size=20", "train.micro_batch_size=5", "train.max_steps=3"),
        *("rollout.max_new_tokens=100", "eval.dataset=null", "eval.steps=-1"),
    ]
    jobs.run(home / "run", words)
    return home / "run"


def test_files_of_other_libraries_and_an_mcp_server_train(folder):
    steps = jobs.train_rows(folder)
    assert len(steps) == 3 and all(np.isfinite(row["train/policy_loss"]) for row in steps)
    samples = [sample for step in (1, 2, 3) for sample in jobs.rollout(folder, step)]
    assert len(samples) == 60
    for name, text in SAYS.items():
        mine = [sample for sample in samples if sample["datasource"] == name]
        assert mine and any(text in sample["reward_query"] for sample in mine), name
        assert all(np.isfinite(sample["reward"]) for sample in mine)
    assert {sample["agent/tool_errors"] for sample in samples if sample["datasource"] == "mcp"} == {0.0}
    assert max(sample["agent/turns"] for sample in samples) > 1
    assert {sample["reward/steps"] is None for sample in samples if sample["datasource"] == "openrlhf"} == {False}
