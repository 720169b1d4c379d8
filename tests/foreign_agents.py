"""Files of agents as they were written for other libraries, and stand-ins for the base classes of two of them."""

OPENRLHF = """
import random
from typing import Any, Dict
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        self.step_idx += 1
        done = states["action_text"].startswith(states["label"]) or self.step_idx == 3
        return {
            "rewards": [1.0] if done else [0.25],
            "scores": 1.0 if done else 0.0,
            "environment_feedback": "" if done else "\\n\\nHuman: no\\nAssistant: ",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"steps": self.step_idx},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
TRL = '''
class Counter:
    def __init__(self):
        self.value = 0

    def reset(self, label, **kwargs) -> str | None:
        self.label = label
        return " The counter begins at 0."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: by how much

        Returns:
            The value after it.
        """
        self.value += step
        return self.value

    def get_reward(self) -> float:
        return float(self.value == int(self.label))
'''
SKYRL = """
from bases import BaseTextEnv

class Echo(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.wanted = extras["reward_spec"]["ground_truth"]

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "begin now"}], {}

    def step(self, action):
        done = action == self.wanted
        return {"observations": [] if done else [{"role": "user", "content": "again"}], "reward": float(done),
                "done": done, "metadata": {}}

    def close(self):
        self.closed = True
"""
GYM = """
import bases as gymnasium

class Corridor(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        self.place = 0
        return " You are at 0.", {}

    def step(self, action):
        self.place += 1 if action == "right" else -1
        return f"You are at {self.place}.", float(self.place == 2), self.place == 2, False, {}

    def close(self): ...
"""
BASES = "class BaseTextEnv: ...\nclass Env: ...\n"
FILES = {"openrlhf": OPENRLHF, "trl": TRL, "skyrl": SKYRL, "gymnasium": GYM}
