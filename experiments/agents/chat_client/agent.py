"""A program that uses the client of OpenAI: a model that cannot add learns to call a function that can.

    python experiments/agents/calculator/agent.py /tmp/calculator
    python run.py task=sft actor.model_name_or_path=builtin:tiny data.dataset=/tmp/calculator/taught.jsonl \
        data.input_key=messages data.multiturn=true data.apply_chat_template=true data.max_len=256 \
        data.tokenizer_chat_template=experiments/agents/tools.jinja data.pack_to_max_len=true \
        ds.param_dtype=fp32 train.batch_size=16 train.max_epochs=2 actor.adam.lr=5e-3 run_dir=/tmp/calculator/sft
    python run.py task=ppo actor.model_name_or_path=/tmp/calculator/sft/model experiment=rloo \
        data.prompt_dataset=/tmp/calculator/asked.jsonl data.input_key=messages data.label_key=label \
        data.apply_chat_template=true data.tokenizer_chat_template=experiments/agents/tools.jinja data.max_len=256 \
        agent.kind=endpoint train.agent_func_path=experiments/agents/chat_client/agent.py agent.max_turns=3 \
        reward.rule=null rollout.batch_size=16 rollout.n_samples_per_prompt=8 train.batch_size=128 \
        train.micro_batch_size=32 rollout.micro_batch_size=64 ds.param_dtype=fp32 \
        actor.adam.lr=1e-3 train.max_steps=20
"""

from __future__ import annotations

import json

from openai import OpenAI

from rlhf_suite.agents.base import Task

NUMBER = {"type": "integer"}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # its connections serve all episodes


def run_agent(task: Task, base_url: str, api_key: str) -> float:
    """Let the model answer a question, and add for it as often as it asks; return 1.0 if the answer is right."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = list(task.messages)
    for _ in range(3):
        answer = client.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": ADD}]
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").strip() == task.label)
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": added(call.function.arguments)})
    return 0.0


def added(arguments: str) -> str:
    """Return the sum that a call asks for, or what is wrong with it."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) + int(given["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
