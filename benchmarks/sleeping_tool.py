"""An environment whose answers take 50 to 400 ms, as tools over a network do, and cost no computation."""

from __future__ import annotations

import asyncio
import random

from rlhf_suite.agents.base import Start, Step, Task, Turn

SHORTEST_S, LONGEST_S = 0.05, 0.4
TURNS = 4


class Environment:
    """Says a word to each turn. Its times depend on the prompt and the turn alone."""

    async def reset(self, task: Task) -> Start:
        self.turns, self.prompt = 0, task.text
        return Start()

    async def step(self, turn: Turn) -> Step:
        """Answer, in the end with a reward that differs between samples."""
        self.turns += 1
        await asyncio.sleep(random.Random(f"{self.prompt} {self.turns}").uniform(SHORTEST_S, LONGEST_S))
        return Step(text=" more ", reward=float(sum(turn.ids) % 7), done=self.turns == TURNS)

    async def close(self) -> None:
        """Nothing is held."""
