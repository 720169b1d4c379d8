"""An environment without a chat template: a wrong answer does not end the episode. The model sees which characters are
right (the others are dots) and may try again; each further try costs 0.3.

    python run.py task=ppo reward.rule=null agent.kind=environment agent.max_turns=3 data.max_len=96 \
        rollout.max_new_tokens=64 train.agent_func_path=experiments/agents/second_try/agent.py
"""

from __future__ import annotations

from rlhf_suite.agents.base import Start, Step, Task, Turn


class Environment:
    """The tries at one prompt."""

    async def reset(self, task: Task) -> Start:
        """Begin with the prompt of the row."""
        self.wanted, self.tries = task.label, 0
        return Start()

    async def step(self, turn: Turn) -> Step:
        """Reward the right answer, and show what is right in a wrong one."""
        self.tries += 1
        answer = turn.content.strip()
        right = answer == self.wanted
        reward = max(0.0, 1.3 - 0.3 * self.tries) if right else 0.0
        shown = "".join(a if a == b else "." for a, b in zip(answer, self.wanted, strict=False))
        hint = f"\n{shown} again: "
        return Step(
            text=hint, reward=reward, done=right, score=float(right and self.tries == 1), extra={"solved": float(right)}
        )

    async def close(self) -> None:
        """Nothing is held."""
