"""Calls of what a user wrote for an environment: within limits, in threads, and with answers that are looked at."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, SupportsFloat, TypeVar

from rlhf_suite.agents.base import Environment, Start, Step
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
    """Yield the fields of an answer that are of another type: name, value, and what is wrong."""
    messages = () if answer.messages is None else answer.messages
    if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
        yield "messages", messages, "it is not a list of messages"
    if not isinstance(answer.text, str | None):
        yield "text", answer.text, "it is not a text"
    if isinstance(answer, Step):
        parts = answer.reward if isinstance(answer.reward, Mapping) else {}
        whole = {"score": answer.score} if parts else {"score": answer.score, "reward": answer.reward}
        numbers = {name: value for name, value in whole.items() if value is not None}
        if not isinstance(answer.rewards, Mapping):
            yield "rewards", answer.rewards, "it is not a dict of a number for each role"
            return
        for name, value in {**numbers, **parts, **answer.rewards, **answer.extra}.items():
            if not isinstance(value, SupportsFloat):
                yield name, value, "it is not a number"


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
