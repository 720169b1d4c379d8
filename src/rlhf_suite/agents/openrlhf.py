"""Environments that were written for OpenRLHF, as they are: a class AgentInstance, the class that an AgentExecutor
names, or the function `step` of its first versions. Text goes in and out, with the special tokens of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlhf_suite.agents.base import Start, Step, Task, Turn
from rlhf_suite.agents.calls import EnvironmentFailure, call, construct
from rlhf_suite.agents.compat import check_dict, get_instance, number, place_of, reward_of
from rlhf_suite.foreign_text import printable

if TYPE_CHECKING:
    from rlhf_suite.agents.session import Session

# What OpenRLHF passes as sampling_params, as vLLM calls it, and the flags that set it here.
FLAGS = {
    **{name: f"rollout.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")},
    "max_tokens": "rollout.max_new_tokens",
}


class OpenRLHFEnvironment:
    """An AgentInstance of OpenRLHF: raw text in, raw text out."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.instance: Any = None
        self.task, self.observed = Task((), ""), ""
        self.session: Session | None = None

    def take_session(self, session: Session) -> None:
        """Take the session of the episode, which knows the texts of tokens and how they are sampled."""
        self.session = session

    async def reset(self, task: Task) -> Start:
        """Give the prompt as the observation; another one that comes back is the prompt of the episode."""
        self.task = task
        self.instance = await construct(self.cls)
        states = {"observation": task.text, "prompt": task.text, "label": task.label}
        given = await call(self.instance.reset, states) if hasattr(self.instance, "reset") else states
        self.observed = str(given["observation"] if isinstance(given, Mapping) else given)
        return Start() if self.observed == task.text else Start(text=self.observed)

    async def step(self, turn: Turn) -> Step:
        """Ask for the feedback to a turn."""
        instance = get_instance(self.instance, self.cls)
        if self.session is None:
            fix = "define take_session(session) in the environment that holds it, and call its take_session there"
            raise EnvironmentFailure(f"{place_of(self.cls)} has no session to read turns by: {fix}")
        action = str(self.session.bridge.tokenizer.decode(turn.ids))
        shown, kept = sampling_params(self.session), sampling_params(self.session)
        states = {
            "observation_text": self.observed,
            "action_text": action,
            "label": self.task.label,
            "sampling_params": shown,
        }
        given = check_dict(await call(instance.step, states), self.cls)
        check_sampling(shown, kept)
        check_sampling(given.get("sampling_params"), kept)
        feedback = str(given.get("environment_feedback") or "")
        self.observed += action + feedback
        return Step(
            text=feedback or None,
            images=tuple(given.get("environment_images") or ()),
            reward=reward_of(given.get("rewards")),
            done=bool(given.get("done")),
            score=number(given.get("scores")),
            extra={name: float(value) for name, value in (given.get("extra_logs") or {}).items()},
        )

    async def close(self) -> None:
        """The interface has no end."""


def class_of_step(function: Callable[..., Any]) -> type:
    """Return the function `step(state, action, label)` of OpenRLHF's first versions as a class AgentInstance. It
    returns (reward, next state, done, extra): a next state begins with state and action, and the rest is feedback."""

    class AgentInstance:
        async def step(self, states: Mapping[str, Any]) -> dict[str, Any]:
            before = states["observation_text"] + states["action_text"]
            given = states["observation_text"], states["action_text"]
            returned = await call(function, *given, label=states["label"])
            if not isinstance(returned, tuple | list) or len(returned) not in (3, 4):
                shown = printable(repr(returned), 60)
                raise EnvironmentFailure(f"step returned {shown}, not a tuple (reward, next state, done, extra)")
            reward, after, done, *extra = returned
            if after is not None and not str(after).startswith(before):
                raise EnvironmentFailure("step returned a state that does not begin with the state and the action")
            feedback = "" if after is None else str(after)[len(before) :]
            return {
                "rewards": reward,
                "environment_feedback": feedback,
                "done": done,
                "extra_logs": dict(*filter(None, extra)),
            }

    return AgentInstance


def class_of_executor(executor: type) -> type:
    """Return the class of environments that an AgentExecutor passes to its base class."""
    cls: type = executor().agent_instance_cls
    return cls


def sampling_params(session: Session) -> SimpleNamespace:
    """Return how the next turn is sampled, under the names of vLLM."""
    own = session.sampling
    values = {name: getattr(own, name) for name in FLAGS if name not in ("stop", "max_tokens")}
    others = {"stop": list(own.stop), "stop_token_ids": list(own.stop_token_ids), "max_tokens": session.room()}
    fixed = {"n": 1, "seed": None, "logprobs": 1, "skip_special_tokens": False, "include_stop_str_in_output": True}
    return SimpleNamespace(**values, **others, **fixed)


def check_sampling(given: Any, kept: SimpleNamespace) -> None:
    """Raise EnvironmentFailure if an environment wants its next turn sampled in another way: the trainer could not
    tell with which probability."""
    for name, flag in FLAGS.items():
        wanted, own = getattr(given, name, getattr(kept, name)), getattr(kept, name)
        if wanted != own and (wanted or own):
            problem = f"the environment changed sampling_params.{name} from {own!r} to {wanted!r}"
            raise EnvironmentFailure(f"{problem}; every turn is sampled alike: set {flag} instead")
