"""Tools: a model that cannot add learns to call a function that can. Half of the examples that it first learns from
are guesses.

    python experiments/agents/calculator/agent.py /tmp/calculator
    python run.py task=sft actor.model_name_or_path=builtin:tiny data.dataset=/tmp/calculator/taught.jsonl \
        data.input_key=messages data.multiturn=true data.apply_chat_template=true data.max_len=256 \
        data.tokenizer_chat_template=experiments/agents/tools.jinja data.pack_to_max_len=true \
        ds.param_dtype=fp32 train.batch_size=16 train.max_epochs=2 actor.adam.lr=5e-3 run_dir=/tmp/calculator/sft
    python run.py task=ppo actor.model_name_or_path=/tmp/calculator/sft/model experiment=rloo \
        data.prompt_dataset=/tmp/calculator/asked.jsonl data.input_key=messages data.label_key=label \
        data.apply_chat_template=true data.tokenizer_chat_template=experiments/agents/tools.jinja data.max_len=256 \
        agent.kind=tools train.agent_func_path=experiments/agents/calculator/agent.py agent.max_turns=3 \
        reward.rule=exact_match rollout.batch_size=16 rollout.n_samples_per_prompt=8 train.batch_size=128 \
        train.micro_batch_size=32 rollout.micro_batch_size=64 ds.param_dtype=fp32 \
        actor.adam.lr=1e-3 train.max_steps=20
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


tools = [add]


def conversation(draw: random.Random) -> dict[str, object]:
    """Return a question that is answered with the tool, or by a guess."""
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    messages: list[dict[str, object]] = [{"role": "user", "content": f"{a} + {b} ="}]
    answer = str(draw.randint(20, 198))
    if draw.random() < 0.5:
        call = {"name": "add", "arguments": {"a": a, "b": b}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "add", "content": str(a + b)})
        answer = str(a + b)
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}


def question(draw: random.Random) -> dict[str, object]:
    """Return a question and its answer."""
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    return {"messages": [{"role": "user", "content": f"{a} + {b} ="}], "label": str(a + b)}


if __name__ == "__main__":
    folder, draw = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, row, count in (("taught", conversation, 6000), ("asked", question, 320)):
        lines = [json.dumps(row(draw)) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
