"""An environment over turns: guess a number from 1 to 3 in two turns. In half of the examples that the model first
learns from, the second guess ignores the hint. It learns to use the hint, and to begin in the middle.

    python experiments/agents/guess/agent.py /tmp/guess
    python run.py task=sft actor.model_name_or_path=builtin:tiny data.dataset=/tmp/guess/taught.jsonl \
        data.input_key=messages data.multiturn=true data.apply_chat_template=true data.max_len=256 \
        data.tokenizer_chat_template=experiments/agents/tools.jinja data.pack_to_max_len=true \
        ds.param_dtype=fp32 train.batch_size=16 train.max_epochs=2 actor.adam.lr=5e-3 run_dir=/tmp/guess/sft
    python run.py task=ppo actor.model_name_or_path=/tmp/guess/sft/model experiment=rloo \
        data.prompt_dataset=/tmp/guess/asked.jsonl data.input_key=messages data.label_key=label \
        data.apply_chat_template=true data.tokenizer_chat_template=experiments/agents/tools.jinja data.max_len=256 \
        agent.kind=environment train.agent_func_path=experiments/agents/guess/agent.py agent.max_turns=2 \
        reward.rule=null rollout.batch_size=16 rollout.n_samples_per_prompt=8 train.batch_size=64 \
        train.micro_batch_size=32 rollout.micro_batch_size=64 ds.param_dtype=fp32 \
        actor.adam.lr=1e-3 train.max_steps=20
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from rlhf_suite.agents.base import Start, Step, Task, Turn

NUMBERS = (1, 2, 3)
QUESTION = {"role": "user", "content": "a number from 1 to 3"}


def answer(guess: int, number: int) -> str:
    """Return what is said of a wrong guess."""
    return "higher" if guess < number else "lower"


class Environment:
    """One number."""

    async def reset(self, task: Task) -> Start:
        """Begin with the prompt of the row."""
        self.number = int(task.label)
        return Start()

    async def step(self, turn: Turn) -> Step:
        """Reward the right number, and say of a wrong one whether the number is higher or lower."""
        text = turn.content.strip()
        guess = int(text) if text.isascii() and text.isdigit() else 0
        if guess == self.number:
            return Step(reward=1.0, done=True)
        return Step.say(answer(guess, self.number), reward=0.0)

    async def close(self) -> None:
        """Nothing is held."""


def game(draw: random.Random) -> dict[str, object]:
    """Return a conversation with a random guess, and if it is wrong with one that may be right or with a random one."""
    number, guess = draw.choice(NUMBERS), draw.choice(NUMBERS)
    messages = [QUESTION, {"role": "assistant", "content": str(guess)}]
    if guess != number:
        said = answer(guess, number)
        possible = [other for other in NUMBERS if other != guess and answer(guess, other) == said]
        again = draw.choice(possible if draw.random() < 0.5 else NUMBERS)
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": str(again)}]
    return {"messages": messages}


if __name__ == "__main__":
    folder, draw = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    taught = [game(draw) for _ in range(6000)]
    asked = [{"messages": [QUESTION], "label": str(draw.choice(NUMBERS))} for _ in range(320)]
    for name, rows in (("taught", taught), ("asked", asked)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
