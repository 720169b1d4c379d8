"""Calls of what a user wrote for an environment: within limits, in threads, and with answers that are looked at."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, SupportsFloat, TypeVar

from rlhf_suite.agents.base import Environment, Start, Step
from rlhf_suite.agents.model_json import HALF_PAIR, is_encodable
from rlhf_suite.foreign_text import describe, printable
from rlhf_suite.waits import in_coroutine, in_thread, runs, waiting

T = TypeVar("T", Start, Step)
CLOSE_TIMEOUT_S = 10.0  # an environment that does not close in this time is left to itself


class EnvironmentFailure(Exception):
    """An error in an environment, or a wait for it that took too long. It becomes the outcome of the episode."""

    def __init__(self, reason: str, is_timeout: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_timeout = reason, is_timeout


async def call_within_limit(
    function: Callable[..., Any], *arguments: Any, limit_s: float | None, where: str = ""
) -> Any:
    """Return what a function of an environment returns. `where` begins the reason of a failure.

    Raises:
        EnvironmentFailure: it raised an error, or took longer than `limit_s`.
    """
    name = getattr(function, "__name__", "step")
    wait = waiting(f"{name} of an environment", limit_s=limit_s, flag="agent.tool_timeout_s")
    try:
        # Tools and Python have a limit, and so a wait, for each call instead.
        with nullcontext() if limit_s is None else wait:
            async with asyncio.timeout(limit_s) as deadline:
                return await call(function, *arguments)
    except Exception as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            reason = f"{name} of the environment took longer than agent.tool_timeout_s={limit_s or 0:g}"
            raise EnvironmentFailure(f"{where}{reason}", is_timeout=True) from error
        if isinstance(error, EnvironmentFailure):
            raise
        raise EnvironmentFailure(f"{where}{describe(error)}") from error


def check_answer(answer: object, wanted: type[T], name: str, where: str) -> T:
    """Return what a method of an environment returned, which is of the wanted type, as its fields are.

    Raises:
        EnvironmentFailure: it is something else.
    """
    if not isinstance(answer, wanted):
        shown = printable(repr(answer), 60)
        raise EnvironmentFailure(f"{where}{name} of the environment returned {shown}, not a {wanted.__name__}")
    for field_name, value, problem in wrong_fields(answer):
        shown = f"{field_name}={printable(repr(value), 60)}"
        raise EnvironmentFailure(
            f"{where}{name} of the environment returned a {wanted.__name__} with {shown}: {problem}"
        )
    return answer


def wrong_fields(answer: Start | Step) -> Iterator[tuple[str, object, str]]:
    """Yield the fields of an answer that cannot be used: name, value, and what is wrong."""
    messages = () if answer.messages is None else answer.messages
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        yield "messages", messages, "it is not a list of messages"
        return
    for place, message in enumerate(messages):
        if (problem := problem_of_message(message)) is not None:
            yield f"messages[{place}]", message, problem
    if not isinstance(answer.text, str | None):
        yield "text", answer.text, "it is not a text"
    elif answer.text is not None and not is_encodable(answer.text):
        yield "text", answer.text, HALF_PAIR
    yield from wrong_start(answer) if isinstance(answer, Start) else wrong_step(answer)


def wrong_start(start: Start) -> Iterator[tuple[str, object, str]]:
    """Yield the fields of a Start alone that cannot be used, as `wrong_fields` does."""
    if start.messages is not None and start.text is not None:
        yield "text", start.text, "it has messages too, and a prompt is either of them"
    if not isinstance(start.tools, list | tuple) or not all(map(is_schema, start.tools)):
        yield "tools", start.tools, 'it is not a list of {"type": "function", "function": {"name": ..., ...}}'


def wrong_step(step: Step) -> Iterator[tuple[str, object, str]]:
    """Yield the fields of a Step alone that cannot be used, as `wrong_fields` does."""
    parts = step.reward if isinstance(step.reward, Mapping) else {}
    whole = {"score": step.score} if parts else {"score": step.score, "reward": step.reward}
    numbers = {name: value for name, value in whole.items() if value is not None}
    if step.messages and step.text:
        yield "text", step.text, "it has messages too, and the model would not see the text"
    if not isinstance(step.images, list | tuple):
        yield "images", step.images, "it is not a list of images"
    if not isinstance(step.rewards, Mapping):
        yield "rewards", step.rewards, "it is not a dict of a number for each role"
    elif not isinstance(step.extra, Mapping):
        yield "extra", step.extra, "it is not a dict of numbers by their names"
    else:
        for name, value in {**numbers, **parts, **step.rewards, **step.extra}.items():
            if not isinstance(name, str):
                yield f"[{name!r}]", value, "its name is not a text"
            if not is_number(value):
                yield str(name), value, "it is not a finite number"


def problem_of_message(message: Mapping[Any, Any]) -> str | None:
    """Return why a message of an environment cannot be shown to the model, None if it can."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        return "a message needs a role, such as user or tool"
    items = content if isinstance(content, list | tuple) else ()
    is_list = bool(items) and all(isinstance(item, Mapping) and isinstance(item.get("type"), str) for item in items)
    if not (isinstance(content, str) or is_list or (content is None and role == "assistant")):
        return "the content of a message is a text, or in a run with images a list of items with a type"
    texts = [content, *(item.get("text") for item in items)]
    return None if all(is_encodable(text) for text in texts if isinstance(text, str)) else HALF_PAIR


def is_schema(tool: object) -> bool:
    """Return whether a value describes a tool, as chat templates show it."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, or an array or tensor with one."""
    try:
        return isinstance(value, SupportsFloat) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # it has several numbers, or is too large
        return False


async def close_environment(environment: Environment) -> None:
    """Close an environment. It can no longer change the episode, so its errors do not matter."""
    with suppress(Exception):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await call(environment.close)


async def construct(cls: Any, **named: Any) -> Any:
    """Return an instance of a user's class, whose `__init__` may be a coroutine function, as OpenRLHF prints it."""
    if not inspect.iscoroutinefunction(cls.__init__):
        return await call(cls, **named)
    instance = cls.__new__(cls, **named)
    await cls.__init__(instance, **named)
    return instance


async def call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Return what a function returns, which may be a coroutine function. Any other runs in a thread of its own: one
    that hangs blocks no other."""
    if inspect.iscoroutinefunction(function):
        return await await_recorded(function(*arguments, **named))
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def deliver(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():  # the wait for it may have ended
            set_it(value)

    def work() -> None:
        try:
            result = function(*arguments, **named)
        except BaseException as error:  # StopIteration cannot be set, and SystemExit would be lost
            problem = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else None
            answer = (done.set_exception, problem or RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            answer = (done.set_result, result)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, *answer)

    thread = threading.Thread(target=work, name="environment", daemon=True)
    thread.start()
    with runs(partial(in_thread, thread.ident)):
        result = await done
    return await await_recorded(result) if inspect.isawaitable(result) else result


async def await_recorded(work: Awaitable[Any]) -> Any:
    """Return the result of an awaitable. Meanwhile the record of waits says which line of the user it is at."""
    with runs(partial(in_coroutine, work)):
        return await work
