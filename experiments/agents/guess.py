"""An environment over turns: guess a number from 1 to 15 in four turns, by what is said of each guess. Half of the
guesses that the model is taught first pay no attention to that.

    python experiments/agents/guess.py /tmp/guess
    python run.py task=sft actor.model_name_or_path=builtin:tiny data.dataset=/tmp/guess/taught.jsonl \
        data.input_key=messages data.multiturn=true data.apply_chat_template=true data.max_len=256 \
        data.tokenizer_chat_template=experiments/agents/tools.jinja data.pack_to_max_len=true ds.packing_samples=true \
        ds.param_dtype=fp32 train.batch_size=16 train.max_epochs=2 actor.adam.lr=5e-3 run_dir=/tmp/guess/sft
    python run.py task=ppo actor.model_name_or_path=/tmp/guess/sft/model experiment=rloo \
        data.prompt_dataset=/tmp/guess/asked.jsonl data.input_key=messages data.label_key=label \
        data.apply_chat_template=true data.tokenizer_chat_template=experiments/agents/tools.jinja data.max_len=256 \
        agent.kind=environment train.agent_func_path=experiments/agents/guess.py agent.max_turns=4 \
        reward.rule=null rollout.batch_size=16 rollout.n_samples_per_prompt=8 train.batch_size=128 \
        train.micro_batch_size=32 rollout.micro_batch_size=64 ds.packing_samples=true ds.param_dtype=fp32 \
        actor.adam.lr=1e-3 train.max_steps=20
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from rlhf_suite.agents.base import Start, Step, Task, Turn

LAST, TURNS = 15, 4


class Environment:
    """One number."""

    async def reset(self, task: Task) -> Start:
        """Begin with the prompt of the row."""
        self.number = int(task.label)
        return Start()

    async def step(self, turn: Turn) -> Step:
        """Reward the right number, and say of another one whether it is too low or too high."""
        guess = turn.content.strip()
        if not (guess.isascii() and guess.isdigit()):
            return Step.say("a number", reward=0.0)
        if int(guess) == self.number:
            return Step(reward=1.0, done=True)
        return Step.say("higher" if int(guess) < self.number else "lower", reward=0.0)

    async def close(self) -> None:
        """Nothing is held."""


def game(draw: random.Random) -> dict[str, object]:
    """Return a conversation in which half of the guesses are possible, and the others any number."""
    number, low, high = draw.randint(1, LAST), 1, LAST
    messages = [question()]
    for _ in range(TURNS):
        guess = draw.randint(low, high) if draw.random() < 0.5 else draw.randint(1, LAST)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        messages.append({"role": "user", "content": "higher" if guess < number else "lower"})
    return {"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]}


def question() -> dict[str, str]:
    """Return the first message of the user."""
    return {"role": "user", "content": f"a number from 1 to {LAST}"}


if __name__ == "__main__":
    folder, draw = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    taught = [game(draw) for _ in range(6000)]
    asked = [{"messages": [question()], "label": str(draw.randint(1, LAST))} for _ in range(320)]
    for name, rows in (("taught", taught), ("asked", asked)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
