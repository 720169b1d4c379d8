"""When a tool is worth its price: a call costs 0.3, and half of the questions already contain the answer. The model
cannot add. It first learns to call the tool for half of the questions of either kind. Then it learns to call the tool
only where it helps.

    python experiments/agents/when_to_call/agent.py /tmp/when_to_call
    python run.py task=sft actor.model_name_or_path=builtin:tiny data.dataset=/tmp/when_to_call/taught.jsonl \
        data.input_key=messages data.multiturn=true data.apply_chat_template=true data.max_len=256 \
        data.tokenizer_chat_template=experiments/agents/tools.jinja data.pack_to_max_len=true \
        ds.param_dtype=fp32 train.batch_size=16 train.max_epochs=2 actor.adam.lr=5e-3 run_dir=/tmp/when_to_call/sft
    python run.py task=ppo actor.model_name_or_path=/tmp/when_to_call/sft/model experiment=rloo \
        data.prompt_dataset=/tmp/when_to_call/asked.jsonl data.input_key=messages data.label_key=label \
        data.apply_chat_template=true data.tokenizer_chat_template=experiments/agents/tools.jinja data.max_len=256 \
        agent.kind=environment train.agent_func_path=experiments/agents/when_to_call/agent.py agent.max_turns=3 \
        reward.rule=null rollout.batch_size=16 rollout.n_samples_per_prompt=8 train.batch_size=128 \
        train.micro_batch_size=32 rollout.micro_batch_size=64 ds.param_dtype=fp32 \
        actor.adam.lr=1e-3 train.max_steps=30
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from rlhf_suite.agents.base import Start, Step, Task, ToolCall, Turn

PRICE = 0.3  # of a call
KINDS = ("sum", "given")  # the tool helps, the answer is in the question: the values of `datasource`


class Environment:
    """One question. It adds for the model as often as that asks for it."""

    async def reset(self, task: Task) -> Start:
        """Begin with the prompt of the row."""
        self.task, self.calls = task, 0
        return Start()

    async def step(self, turn: Turn) -> Step:
        """Answer calls at their price, and reward the right answer."""
        if turn.calls and not turn.is_cut:
            self.calls += len(turn.calls)
            return Step(tuple(map(answer, turn.calls)), reward=-PRICE * len(turn.calls), score=0.0, extra=self.used())
        right = float(turn.content.strip() == self.task.label)
        return Step(reward=right, score=right, done=True, extra=self.used())

    def used(self) -> dict[str, float]:
        """Return the number of calls, as a metric of the kind of the question."""
        return {f"calls_{self.task.datasource}": float(self.calls)}

    async def close(self) -> None:
        """Nothing is held."""


def answer(call: ToolCall) -> dict[str, object]:
    """Return the message with the sum that a call asks for, or with what is wrong with it."""
    try:
        text = call.problem or str(int(call.arguments["a"]) + int(call.arguments["b"]))
    except (KeyError, TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    return {"role": "tool", "name": call.name, "content": text}


def question(draw: random.Random) -> tuple[int, int, dict[str, object]]:
    """Return two numbers, and the row that asks for their sum."""
    a, b, kind = draw.randint(10, 99), draw.randint(10, 99), draw.choice(KINDS)
    text = f"{a} + {b} =" if kind == "sum" else f"{a + b} is {a} + {b} ="
    return a, b, {"messages": [{"role": "user", "content": text}], "label": str(a + b), "datasource": kind}


def lesson(draw: random.Random) -> dict[str, object]:
    """Return a conversation with a call, or with an answer at once: a guess, unless the answer is given."""
    a, b, row = question(draw)
    said = str(a + b)
    messages = list(row["messages"])  # type: ignore[call-overload]
    if draw.random() < 0.5:
        call = {"name": "add", "arguments": {"a": a, "b": b}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "add", "content": said})
    elif row["datasource"] == "sum":
        said = str(draw.randint(20, 198))
    return {"messages": [*messages, {"role": "assistant", "content": said}]}


if __name__ == "__main__":
    folder, draw = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    taught, asked = [lesson(draw) for _ in range(6000)], [question(draw)[2] for _ in range(480)]
    for name, rows in (("taught", taught), ("asked", asked)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
