"""The game of experiments/agents/guess as a real OpenEnv server. It does not import the suite, and needs a separate
Python environment:

    python -m venv /tmp/openenv && /tmp/openenv/bin/pip install openenv-core==0.3.0
    /tmp/openenv/bin/python experiments/agents/openenv/server.py 8000 &

The run is that of experiments/agents/guess/agent.py, with another agent:

    python run.py task=ppo ... agent.kind=environment agent.server_url=ws://127.0.0.1:8000/ws agent.max_turns=2
"""

from __future__ import annotations

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

SESSIONS = 256  # connections at a time, one per episode: at least agent.max_concurrent


class Guess(Action):
    """What the model says: agent.action_key=message, which is the default."""

    message: str


class Answer(Observation):
    """What it is told."""

    text: str = ""


class Game(Environment[Guess, Answer, State]):
    """One number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, label: str = "", **row: object) -> Answer:
        """Begin with the prompt of the row; `label` is its label."""
        self.number, self.turns = int(label), 0
        return Answer()

    def step(self, action: Guess, timeout_s: float | None = None, **options: object) -> Answer:
        """Reward the right number, and say of a wrong one whether the number is higher or lower."""
        self.turns += 1
        text = action.message.strip()
        guess = int(text) if text.isascii() and text.isdigit() else 0
        if guess == self.number:
            return Answer(reward=1.0, done=True)
        return Answer(text="higher" if guess < self.number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        """Return how many turns there were."""
        return State(step_count=self.turns)


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
