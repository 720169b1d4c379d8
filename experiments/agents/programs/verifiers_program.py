"""An environment of verifiers with a tool that adds, and a rubric. agent.py runs it; it does not import the suite.

pip install verifiers==0.1.14
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def is_right(completion: list[dict[str, str]], answer: str) -> float:
    """Return 1.0 if the last message is the right answer."""
    return float(str(completion[-1]["content"]).strip() == answer)


task = json.load(sys.stdin)
row = {"prompt": task["messages"], "answer": task["label"], "example_id": 0}
environment = vf.ToolEnv(tools=[add], max_turns=3, dataset=Dataset.from_list([row]), rubric=vf.Rubric(funcs=[is_right]))
endpoint = ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
state = asyncio.run(environment.run_rollout(row, endpoint, "policy", {}))
print(json.dumps({"reward": state["reward"]}))
