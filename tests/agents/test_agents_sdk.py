"""The Agents SDK of OpenAI, unchanged, at the endpoint. It is not a dependency of the suite: where the Python of the
tests does not have it, name one that has.

    python -m venv agents && agents/bin/pip install openai-agents==0.24.0
    OPENAI_AGENTS_PYTHON=agents/bin/python python -m pytest tests/agents/test_agents_sdk.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from endpoint_episodes import CALL, Model, trained

pytestmark = pytest.mark.stack
CLIENT = Path(__file__).with_name("agents_sdk_client.py")
INTERPRETER = "OPENAI_AGENTS_PYTHON"


@pytest.fixture
def interpreter():
    if named := os.environ.get(INTERPRETER):
        return named
    try:
        version("openai-agents")
    except PackageNotFoundError:
        pytest.skip(f"openai-agents is not installed; {INTERPRETER} may name a Python that has it")
    return sys.executable


def test_the_agents_sdk_calls_tools_over_both_of_its_apis(play, tokenizer, interpreter):
    said = []

    def run_agent(task, base_url, api_key):
        found = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "PATH": os.environ["PATH"]}
        ran = subprocess.run(
            [interpreter, "-P", CLIENT], env=found, capture_output=True, text=True, timeout=300, check=False
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        said.extend(json.loads(ran.stdout.splitlines()[-1]))
        return 1.0

    def calls_once(prompt: str) -> str:
        return "done" if "tool\n" in prompt else f"so\n{CALL}"

    policy = Model(tokenizer, calls_once)
    episode, ledgers = play(run_agent, policy, overrides=True)
    assert said == ["done"] * 4, episode.outcome
    assert [len(ledger.turns) for ledger in ledgers] == [2] * 4 and trained(ledgers) == sorted(policy.written)
