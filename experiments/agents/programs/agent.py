"""A program in a separate Python environment: LangGraph, OpenAI's Agents SDK, verifiers, or any other program that
requests chat completions.

    python -m venv agents && agents/bin/pip install langchain langchain-openai openai-agents
    export AGENT_PROGRAM="agents/bin/python experiments/agents/programs/langgraph_program.py"

Then train with the commands of experiments/agents/chat_client/agent.py, but with these values of two flags:

    python run.py task=ppo ... train.agent_func_path=experiments/agents/programs/agent.py agent.max_concurrent=4

Each episode is a process: it finds the URL and the key of its episode in OPENAI_BASE_URL and OPENAI_API_KEY, and reads
the task from standard input as JSON. The last line that it prints is its answer, or {"reward": ...} if it scores
itself.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess

from rlhf_suite.agents.base import Task

TIMEOUT_S = 120.0


def run_agent(task: Task, base_url: str, api_key: str) -> float:
    """Run the program on a task; return its own reward, or 1.0 if its answer is right."""
    process = subprocess.run(
        shlex.split(os.environ["AGENT_PROGRAM"]),
        env=os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
        input=json.dumps({"messages": task.messages, "label": task.label}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"exit code {process.returncode}: {process.stderr[-300:]}")
    said = "".join(process.stdout.splitlines()[-1:])
    return float(json.loads(said)["reward"] if said.startswith("{") else said == task.label)
