"""Agents of OpenAI's Agents SDK that add with a tool, over chat completions and over Responses, whole and streamed.

It runs in a Python environment of its own, which has openai-agents and nothing of the suite, and finds its endpoint in
OPENAI_BASE_URL and OPENAI_API_KEY. It prints the final answer of each run.
"""

from __future__ import annotations

import asyncio
import json

from openai import AsyncOpenAI

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    set_tracing_disabled(True)  # it would send the conversation to OpenAI
    client, said = AsyncOpenAI(), []
    for cls in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        settings = ModelSettings(temperature=0.3)
        model = cls("gpt", client)
        agent = Agent(name="sum", instructions="be brief", tools=[add], model=model, model_settings=settings)
        said.append((await Runner.run(agent, "1 + 2?")).final_output)
        streamed = Runner.run_streamed(agent, "2 + 2?")
        async for _ in streamed.stream_events():
            pass
        said.append(streamed.final_output)
    print(json.dumps(said))


asyncio.run(main())
