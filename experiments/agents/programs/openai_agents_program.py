"""An agent of OpenAI's Agents SDK that uses a tool to add. agent.py runs it; it does not import the suite.

pip install openai-agents
"""

from __future__ import annotations

import json
import sys

from openai import AsyncOpenAI

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_tracing_disabled(True)  # it would send the conversation to OpenAI
model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())  # URL and key: from the environment
agent = Agent(name="calculator", tools=[add], model=model)
result = Runner.run_sync(agent, json.load(sys.stdin)["messages"], max_turns=3)
print(str(result.final_output).strip())
