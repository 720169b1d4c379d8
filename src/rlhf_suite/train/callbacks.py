"""Callbacks: code of the user that a run of training calls after its steps (`train.callbacks`, docs/callbacks.md).

They run in the process of the run, between steps, so they see and decide the same whatever the number of ranks. What
they ask for is an object: `Stop`, `Save` or `Evaluate`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rlhf_suite.errors import RunError
from rlhf_suite.foreign_text import describe
from rlhf_suite.python_source import SourceError, signature, why_not_called
from rlhf_suite.registry import callback
from rlhf_suite.tracking.console import show_line

FLAG = "train.callbacks"
CALLS = {
    "on_start": ("started",),
    "on_step": ("step", "metrics", "samples"),
    "on_evaluation": ("step", "metrics"),
    "on_checkpoint": ("folder",),
    "on_end": ("status",),
}
STATE, LOAD = "state", "load"  # further methods: what a checkpoint keeps, and gives back


@dataclass(frozen=True)
class Stop:
    """End the run after this step, as if it were the last one: its model is written."""

    reason: str = ""


@dataclass(frozen=True)
class Save:
    """Write a checkpoint after this step."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate after this step."""


@dataclass(frozen=True)
class Started:
    """A run that begins or goes on: its folder, the step that it has reached (0: none), and the number of its steps."""

    folder: Path
    step: int
    total_steps: int


Wish = Stop | Save | Evaluate
W = TypeVar("W", Stop, Save, Evaluate)


@dataclass
class Callbacks:
    """The callbacks of a run, in the order of the flag: instances of the user's classes, and functions for `on_step`.

    As a part of the driver's state it keeps what their `state()` returns.
    """

    names: Sequence[str] = ()
    made: list[Any] = field(init=False)
    asked: dict[type[Wish], Wish] = field(init=False, default_factory=dict)
    has_started: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.made = [make(name) for name in self.names]

    def has(self, call: str) -> bool:
        """Return whether one of them has this method."""
        return any(hasattr(one, call) for one in self.made)

    def start(self, folder: Path, step: int, total_steps: int) -> None:
        """Tell them that the run begins or goes on."""
        self.has_started = True
        self.call("on_start", Started(folder, step, total_steps))

    def step(self, step: int, metrics: Mapping[str, float], samples: Callable[[], Any]) -> None:
        """Tell them that `step` (from 1) is trained. `samples()` makes the table of its rollout; None elsewhere."""
        if self.has("on_step"):
            self.call("on_step", step, MappingProxyType(dict(metrics)), samples())

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell them the metrics of an evaluation."""
        self.call("on_evaluation", step, MappingProxyType(dict(metrics)))

    def checkpoint(self, folder: Path) -> None:
        """Tell them that a checkpoint is written."""
        self.call("on_checkpoint", folder)

    def end(self, status: str) -> None:
        """Tell them that the run ends: done, stopped or failed; nothing if it ends before it has begun. What they ask
        for then is not done, and an error of theirs does not hide why the run was stopped or failed."""
        if not self.has_started:
            return
        try:
            self.call("on_end", status)
        except RunError as error:
            if status == "done":
                raise
            show_line(str(error), to_stderr=True)

    def wants(self, kind: type[Wish]) -> bool:
        """Return whether they have asked for this, which is not taken yet."""
        return kind in self.asked

    def take(self, kind: type[W]) -> W | None:
        """Return what they have asked for of this kind since the last call of the same kind, or None."""
        wish = self.asked.pop(kind, None)
        assert wish is None or isinstance(wish, kind)
        return wish

    def call(self, name: str, *arguments: Any) -> None:
        """Call the method `name` of those that have it, and take note of what they ask for.

        Raises:
            RunError: one of them raised an error, or returned something else.
        """
        for flag, one in zip(self.names, self.made, strict=True):
            if hasattr(one, name):
                self.note(flag, name, run(flag, name, lambda: getattr(one, name)(*arguments)))  # noqa: B023 - at once

    def note(self, flag: str, name: str, answer: object) -> None:
        """Take note of what one of them has asked for."""
        for wish in answer if isinstance(answer, tuple | list) else [answer]:
            if isinstance(wish, Stop | Save | Evaluate):
                self.asked.setdefault(type(wish), wish)
            elif wish is not None:
                returned = f"{name} returned {type(wish).__name__}"
                raise RunError(f"{FLAG}={flag}: {returned}; return None, rs.Stop(reason), rs.Save() or rs.Evaluate()")

    def state_dict(self) -> dict[str, Any]:
        """Return what they keep in checkpoints, by their names in the flag."""
        kept = {
            flag: run(flag, STATE, one.state)
            for flag, one in zip(self.names, self.made, strict=True)
            if hasattr(one, STATE)
        }
        for flag, state in kept.items():
            run(flag, STATE, lambda: json.dumps(state))  # noqa: B023 - at once
        return kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give them back what a checkpoint kept of them."""
        for flag, one in zip(self.names, self.made, strict=True):
            if flag in state and hasattr(one, LOAD):
                run(flag, LOAD, lambda: one.load(state[flag]))  # noqa: B023 - at once


class OnStep:
    """A function as a callback."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.on_step = function


def make(name: str) -> Any:
    """Return a callback by its name in the flag.

    Raises:
        SourceError: it is none, or it could not be made.
    """
    loaded = load(name)
    if not inspect.isclass(loaded):
        return OnStep(loaded)
    try:
        return loaded()
    except Exception as error:
        raise SourceError(f"{FLAG}={name}: {name}() failed: {describe(error)}", "correct it") from error


def load(name: str) -> Any:
    """Return the class or function that a name in the flag stands for. Nothing is made of it.

    Raises:
        SourceError: it is neither a class with methods of a callback, made without arguments, nor a function.
    """
    loaded = callback.load(name)
    if not inspect.isclass(loaded):
        return loaded
    methods = [method for method in dir(loaded) if method.startswith("on_")]
    if unknown := [method for method in methods if method not in CALLS]:
        raise SourceError(f"{name} has a method {unknown[0]}, which nobody calls", f"name it {', '.join(CALLS)}")
    if not methods:
        raise SourceError(f"{name} has no method that a run calls", f"define {', '.join(signatures())}")
    for method in methods:
        check_arguments(name, getattr(loaded, method), method)
    if (needed := why_not_called(loaded)) is not None:
        raise SourceError(f"{name} is made without arguments, and {needed}", "give them default values")
    return loaded


def check_arguments(name: str, method: Callable[..., Any], called: str) -> None:
    """Raise SourceError if a method cannot be called with the arguments that it will get."""
    if (wrong := why_not_called(method, None, *CALLS[called])) is not None:
        problem = f"{name}.{called} is called with ({', '.join(CALLS[called])}), and {wrong}"
        raise SourceError(problem, f"write {signature(called, ('self', *CALLS[called]))}")


def signatures() -> Iterator[str]:
    """Yield how the methods of a callback begin."""
    yield from (f"{name}(self, {', '.join(arguments)})" for name, arguments in CALLS.items())


def run(flag: str, name: str, work: Callable[[], Any]) -> Any:
    """Return what code of the user returns. An error ends the run, and says where it was raised."""
    try:
        return work()
    except Exception as error:
        raise RunError(f"{FLAG}={flag}: {name} failed: {describe(error)}") from error
