"""Environments that were written for other libraries, used as they are: their classes are not imported from there
(those of OpenRLHF are in `openrlhf`).

What such an environment does that would change the tokens of the model (rewriting its turns, sampling by other
settings) is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_suite.agents.base import Start, Step, Task, Turn
from rlhf_suite.agents.calls import EnvironmentFailure, call, construct
from rlhf_suite.agents.tools import FunctionTools, ToolEnvironment
from rlhf_suite.data.messages import Message
from rlhf_suite.foreign_text import printable


class TRLEnvironment:
    """An environment of TRL: `reset` takes the row by name, the other public methods are tools, `get_reward` scores."""

    def __init__(self, cls: type, timeout_s: float) -> None:
        self.cls, self.timeout_s = cls, timeout_s
        self.instance: Any = None
        self.tools = ToolEnvironment([], timeout_s)

    async def reset(self, task: Task) -> Start:
        """Reset with the columns of the row; a text that it returns is added to the last message of the user."""
        self.instance = await construct(self.cls)
        self.tools = ToolEnvironment([FunctionTools(tools_of(self.instance))], self.timeout_s)
        row = {"prompt": list(task.messages), "label": task.label, "datasource": task.datasource, **task.columns}
        parameters = inspect.signature(self.instance.reset).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            row = {name: value for name, value in row.items() if name in {parameter.name for parameter in parameters}}
        text = await call(self.instance.reset, **row)
        start = await self.tools.reset(task)
        return start if not text else Start(tuple(with_text(task.messages, str(text))), tools=start.tools)

    async def step(self, turn: Turn) -> Step:
        """Answer the calls of a turn."""
        return await self.tools.step(turn)

    async def last_step(self) -> Step:
        """Ask for the reward, once for every episode."""
        if not hasattr(self.instance, "get_reward"):
            return Step()
        return Step(reward=reward_of(await call(self.instance.get_reward)))

    async def close(self) -> None:
        """The interface has no end."""


def tools_of(instance: object) -> list[Callable[..., Any]]:
    """Return the public methods of an environment of TRL that the model calls."""
    names = [name for name in dir(type(instance)) if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [method for name in names if inspect.ismethod(method := getattr(instance, name))]


class SkyRLEnvironment:
    """A BaseTextEnv of skyrl-gym: messages for a text."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.instance: Any = None

    async def reset(self, task: Task) -> Start:
        """Make the environment with the columns of the row; it may rewrite the prompt."""
        extras = {"reward_spec": {"ground_truth": task.label}, **task.columns}
        self.instance = await construct(self.cls, **({"extras": extras} if takes(self.cls, "extras") else {}))
        given = await call(self.instance.init, list(task.messages))
        messages, _ = check_returned(given, 2, self.cls, "init")
        return Start(tuple(messages))

    async def step(self, turn: Turn) -> Step:
        """Ask for the observations that follow the text of a turn."""
        given = check_dict(await call(get_instance(self.instance, self.cls).step, turn.text), self.cls)
        if given.get("postprocessed_action") not in (None, turn.text):
            raise EnvironmentFailure("the environment returned a postprocessed_action; what the model wrote is kept")
        messages = tuple(given.get("observations") or ())
        return Step(messages, reward=number(given.get("reward")), done=bool(given.get("done")))

    async def close(self) -> None:
        """Close the environment."""
        if self.instance is not None and hasattr(self.instance, "close"):
            await call(self.instance.close)


class GymnasiumEnvironment:
    """A Gymnasium environment whose observations and actions are texts."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.instance: Any = None

    async def reset(self, task: Task) -> Start:
        """Reset it; the observation is added to the last message of the user."""
        self.instance = await construct(self.cls)
        given = await call(self.instance.reset, options={"label": task.label, **task.columns})
        observation, _ = check_returned(given, 2, self.cls, "reset")
        return Start(tuple(with_text(task.messages, text_observation(observation))))

    async def step(self, turn: Turn) -> Step:
        """Take the content of a turn as the action."""
        step = get_instance(self.instance, self.cls).step
        given = check_returned(await call(step, turn.content), 5, self.cls, "step")
        observation, reward, terminated, truncated, _ = given
        message: Message = {"role": "user", "content": text_observation(observation)}
        extra = {"agent/environment_truncated": float(truncated)}
        return Step((message,), reward=number(reward), done=bool(terminated or truncated), extra=extra)

    async def close(self) -> None:
        """Close the environment."""
        if self.instance is not None:
            await call(self.instance.close)


def get_instance(instance: Any, cls: Any) -> Any:
    """Return the instance of an episode.

    Raises:
        EnvironmentFailure: there is none, because another environment, which holds this one, did not reset it.
    """
    if instance is None:
        fix = "call its reset in reset of the environment that holds it"
        raise EnvironmentFailure(f"{place_of(cls)} got a turn before its reset was called: {fix}")
    return instance


def check_dict(given: Any, cls: Any) -> Mapping[str, Any]:
    """Return what `step` of a class of the user's returned, which is a dict.

    Raises:
        EnvironmentFailure: it is something else.
    """
    if not isinstance(given, Mapping):
        raise EnvironmentFailure(f"{place_of(cls)}: step returned {printable(repr(given), 60)}, not a dict")
    return given


def check_returned(given: Any, count: int, cls: Any, name: str) -> Sequence[Any]:
    """Return what a method of a class of the user's returned, which is a tuple of so many values.

    Raises:
        EnvironmentFailure: it is something else.
    """
    if not isinstance(given, tuple | list) or len(given) != count:
        shown = printable(repr(given), 60)
        raise EnvironmentFailure(f"{place_of(cls)}: {name} returned {shown}, not a tuple of {count} values")
    return given


def place_of(cls: Any) -> str:
    """Return the file and the name of a class of the user's."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", cls.__module__)
    return f"{file}: class {cls.__name__}"


def with_text(messages: tuple[Message, ...], text: str) -> Iterator[Message]:
    """Yield a conversation with a text at the end of its last message of the user."""
    last = max((place for place, entry in enumerate(messages) if entry["role"] == "user"), default=None)
    for place, message in enumerate(messages):
        content = message["content"]
        whole = f"{content}{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
        yield {**message, "content": whole} if place == last else message


def text_observation(value: object) -> str:
    if not isinstance(value, str):
        raise EnvironmentFailure(f"an observation is of type {type(value).__name__}, not text")
    return value


def number(value: Any) -> float | None:
    """Return a number, or a tensor or list with one, as a float; None for None."""
    if value is None:
        return None
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return float(value)


def reward_of(value: Any) -> float | dict[str, float] | None:
    """Return a reward: a number, or named parts."""
    if not isinstance(value, Mapping):
        return number(value)
    return {name: float(part) for name, part in value.items() if part is not None}


def takes(cls: type, name: str) -> bool:
    """Return whether the constructor of a class takes an argument of this name."""
    parameters = inspect.signature(cls).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
