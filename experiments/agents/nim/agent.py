"""Self-play: two roles take turns and remove one or two stones; the role that takes the last stone wins. Each role gets
+1 or -1, and is compared only with the same role in other games. With 4 or 5 stones the first player wins if it leaves
three. The model first learns random moves.

    python experiments/agents/nim/agent.py /tmp/nim
    python run.py task=sft actor.model_name_or_path=builtin:tiny data.dataset=/tmp/nim/taught.jsonl \
        data.input_key=messages data.multiturn=true data.apply_chat_template=true data.max_len=256 \
        data.pack_to_max_len=true ds.param_dtype=fp32 train.batch_size=16 train.max_epochs=2 actor.adam.lr=5e-3 \
        run_dir=/tmp/nim/sft
    python run.py task=ppo actor.model_name_or_path=/tmp/nim/sft/model experiment=rloo \
        data.prompt_dataset=experiments/agents/nim/agent.py data.input_key=prompt data.label_key=stones \
        data.max_len=256 data.apply_chat_template=true agent.kind=environment \
        train.agent_func_path=experiments/agents/nim/agent.py agent.max_turns=9 reward.rule=null \
        rollout.batch_size=16 rollout.n_samples_per_prompt=8 train.batch_size=64 \
        train.micro_batch_size=32 rollout.micro_batch_size=64 ds.param_dtype=fp32 \
        actor.adam.lr=1e-3 train.max_steps=30
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from rlhf_suite.agents.base import Start, Step, Task, Turn
from rlhf_suite.data.messages import Message

STONES = (4, 5)  # at the beginning; the first player can always leave three
OTHER = {"first": "second", "second": "first"}


def rows() -> list[dict[str, object]]:
    """Return the prompts, by the number of stones."""
    return [{"prompt": told(stones), "stones": str(stones)} for stones in STONES * 240]


def told(stones: int) -> str:
    """Return what a player is told of the stones that are left."""
    return f"{stones} stones"


class Environment:
    """One game."""

    roles = ("first", "second")

    async def reset(self, task: Task) -> dict[str, Start]:
        """Let the first player begin with the prompt of the row. The second one is told the stones before its move."""
        self.stones = int(task.label)
        self.chances, self.best = 0, 0  # moves that could leave a multiple of three, and those that did
        return {"first": Start(), "second": Start(messages=())}

    async def step(self, role: str, turn: Turn) -> Step:
        """Take the stones, and let the other player move. An illegal move loses."""
        taken = {"1": 1, "2": 2}.get(turn.content.strip(), 0)
        self.chances += self.stones % 3 != 0
        self.best += self.stones % 3 != 0 and taken == self.stones % 3
        if not 0 < taken <= self.stones:
            return self.won_by(OTHER[role])
        self.stones -= taken
        if not self.stones:
            return self.won_by(role)
        return Step.say(told(self.stones), role=OTHER[role])

    def won_by(self, role: str) -> Step:
        """Return the last step of a game."""
        numbers = {"best_moves": self.best / self.chances}
        return Step(done=True, rewards={role: 1.0, OTHER[role]: -1.0}, extra=numbers)

    async def close(self) -> None:
        """Nothing is held."""


def game(draw: random.Random) -> dict[str, list[Message]]:
    """Return what one player of a game of random moves hears and says."""
    stones, hears, messages = draw.choice(STONES), draw.random() < 0.5, list[Message]()
    while stones:
        taken = draw.randint(1, min(2, stones))
        if hears:
            messages += [{"role": "user", "content": told(stones)}, {"role": "assistant", "content": str(taken)}]
        stones, hears = stones - taken, not hears
    return {"messages": messages}


if __name__ == "__main__":
    folder, draw = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    taught = [conversation for conversation in (game(draw) for _ in range(6000)) if conversation["messages"]]
    (folder / "taught.jsonl").write_text("\n".join(map(json.dumps, taught)) + "\n")
