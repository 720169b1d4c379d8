"""The agent of an environment: turns of the model and steps of the environment alternate until one of them ends it.

Tools, Python sessions and environments of other libraries are environments too (`tools`, `python_tool`, `compat`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

from rlhf_suite.agents.base import Environment, Episode, Start, Step, Task, Turn
from rlhf_suite.data.ending import Ending
from rlhf_suite.foreign_text import describe, printable
from rlhf_suite.rewards.base import Choice, Outcome, RewardFailure, Scored
from rlhf_suite.waits import in_coroutine, in_thread, runs, waiting

if TYPE_CHECKING:
    from rlhf_suite.agents.compaction import Compaction
    from rlhf_suite.agents.session import Session

T = TypeVar("T", Start, Step)
CLOSE_TIMEOUT_S = 10.0  # an environment that does not close in this time is left to itself


class EnvironmentFailure(Exception):
    """An error in an environment, or a wait for it that took too long. It becomes the outcome of the episode."""

    def __init__(self, reason: str, is_timeout: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_timeout = reason, is_timeout


@dataclass
class Progress:
    """What an episode has gained so far."""

    choice: Choice = field(default_factory=Choice)  # of the parts of a reward
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)  # sums over the steps
    score: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    problems: int = 0  # calls that could not be read
    summaries: list[int] | None = None  # the tokens of each; None: the agent asks for none

    def add_turn(self, turn: Turn, step: Step) -> float:
        """Take the numbers of a turn and the step that answers it. Return the reward of the step, 0 without one."""
        self.calls += len(turn.calls)
        self.problems += sum(call.problem is not None for call in turn.calls)
        return self.add_step(step)

    def add_step(self, step: Step) -> float:
        """Take the numbers of a step. Return its reward, 0 without one."""
        reward = self.reward(step)
        if reward is not None:
            if not math.isfinite(reward):
                raise EnvironmentFailure(f"the environment gave the reward {reward}")
            self.rewards.append(float(reward))
        self.score = step.score if step.score is not None else self.score
        self.extra |= step.extra
        return float(reward or 0.0)

    def reward(self, step: Step) -> float | None:
        """Return the reward of a step, and add its named parts to those of the episode."""
        if not isinstance(step.reward, Mapping):
            if step.reward is not None and self.choice.key is not None:
                problem = "the environment gave a number without a name"
                raise EnvironmentFailure(f"reward.reward_key={self.choice.key}, and {problem}")
            return step.reward
        for name, value in step.reward.items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        if not step.reward or (self.choice.key is not None and self.choice.key not in step.reward):
            return None
        return self.choice.reward(step.reward, {})

    def outcome(self, last: float) -> Outcome | None:
        """Return the outcome whose reward is `last`, that of the last step; None if no step had a reward."""
        if not self.rewards:
            return None
        return Scored(last, sum(self.rewards) if self.score is None else self.score, dict(self.extra))

    def metrics(self, turns: int) -> dict[str, float]:
        """Return the metrics of the episode."""
        counts = {"turns": turns, "calls": self.calls, "malformed_calls": self.problems}
        if self.summaries is not None:
            counts |= {"compactions": len(self.summaries), "summary_tokens": sum(self.summaries)}
        return self.parts | self.extra | {f"agent/{name}": float(value) for name, value in counts.items()}


class EnvironmentAgent:
    """Runs the episodes of environments that `make` returns.

    `max_turns` bounds the turns of an episode, `timeout_s` its time, and `step_timeout_s` the time of each answer of
    the environment (None: only by `timeout_s`).
    """

    def __init__(  # noqa: PLR0913 - what a run says of its episodes
        self,
        make: Callable[[], Environment],
        max_turns: int,
        timeout_s: float,
        step_timeout_s: float | None = None,
        *,
        must_score: bool = False,
        choice: Choice | None = None,
        compaction: Compaction | None = None,
    ) -> None:
        self.make, self.max_turns, self.choice = make, max_turns, choice or Choice()
        self.must_score = must_score  # nobody else does
        self.timeout_s, self.step_timeout_s = timeout_s, step_timeout_s
        self.compaction = compaction  # None: a conversation ends where its ledger is full

    def limit_turns(self, max_turns: int) -> EnvironmentAgent:
        """Return the same agent with at most so many turns in an episode."""
        result = copy(self)
        result.max_turns = max_turns
        return result

    async def run(self, task: Task, session: Session) -> Episode:
        """Run one episode. An error of the environment is its outcome; an error of the policy is raised."""
        progress = Progress(self.choice, summaries=None if self.compaction is None else [])
        environment: Environment | None = None
        ending = Ending.FINISHED
        outcome: Outcome | None
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                environment = await self.ask(self.make)
                ending, last = await self.play(environment, task, session, progress)
                last += await self.last_words(environment, session, progress)
            outcome = self.outcome(ending, last, progress)
        except EnvironmentFailure as error:
            outcome = RewardFailure(error.reason, "timeout" if error.is_timeout else "error")
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = f"the episode was not finished after agent.timeout_s={self.timeout_s:g}"
            outcome = RewardFailure(f"{reason} ({session.num_turns} turns)", "timeout")
        finally:
            if environment is not None:
                await close_environment(environment)
        return session.episode(outcome, ending, progress.metrics(session.num_turns))

    async def play(
        self, environment: Environment, task: Task, session: Session, progress: Progress
    ) -> tuple[Ending, float]:
        """Play to the end, and return why it ended and the reward of the last step."""
        if (take_session := getattr(environment, "take_session", None)) is not None:
            take_session(session)
        start = check_answer(await self.ask(environment.reset, task), Start, "reset", "")
        if not session.set_prompt(start.messages, start.text, start.tools):
            raise EnvironmentFailure("the prompt of the environment leaves no room for a turn in data.max_len")
        while True:
            turn = await session.reply()
            where = f"turn {session.num_turns}: "
            step = check_answer(await self.ask(environment.step, turn, where=where), Step, "step", where)
            reward = progress.add_turn(turn, step)
            if (ending := self.ending_at(turn, step, session)) is not None:
                return ending, reward
            fits, asks_summary = self.append_answer(step, session)
            if not fits:
                return Ending.FULL, reward
            if reward:
                session.latest.ledger.reward_turn(reward)
            if asks_summary and (ending := await self.compact(session, progress)) is not None:
                return ending, 0.0

    async def last_words(self, environment: Environment, session: Session, progress: Progress) -> float:
        """Return the reward that an environment gives at the end of its episode, however that ended; 0 if it has no
        method `last_step`, or that gives none."""
        last_step = getattr(environment, "last_step", None)
        if last_step is None:
            return 0.0
        where = f"after turn {session.num_turns}: "
        return progress.add_step(check_answer(await self.ask(last_step, where=where), Step, "last_step", where))

    def outcome(self, ending: Ending, last: float, progress: Progress) -> Outcome | None:
        """Return the outcome of an episode with the last reward `last`; None if the reward sources of the run score it.

        An environment that pays at its end alone has paid nothing when a limit ends the episode: that is a reward of 0.
        """
        outcome = progress.outcome(last)
        if outcome is not None or not self.must_score:
            return outcome
        if ending is not Ending.FINISHED:
            return Scored(0.0, 0.0, dict(progress.extra))
        problem = "no step of the environment had " + (f"a part {self.choice.key} in its" if progress.parts else "a")
        raise EnvironmentFailure(f"{problem} reward, and the run has no reward source")

    def ending_at(self, turn: Turn, step: Step, session: Session) -> Ending | None:
        """Return why the episode ends with this step; None if another turn may follow."""
        if turn.is_cut:
            return Ending.CUT
        if step.done or not (step.messages or step.text):
            return Ending.FINISHED
        return Ending.TURNS if session.num_turns >= self.max_turns else None

    def append_answer(self, step: Step, session: Session) -> tuple[bool, bool]:
        """Append the answer to a turn, with the request for a summary where the conversation is long. Return whether a
        turn fits behind it, and whether that is the summary."""
        try:
            if not step.messages:
                return session.observe_text(step.text or "", images=step.images), False
            asks_summary = self.compaction is not None and self.compaction.is_due(session, step.messages)
            request = self.compaction.prompt if self.compaction is not None and asks_summary else None
            return session.observe(step.messages, request), asks_summary
        except ValueError as error:
            raise EnvironmentFailure(f"the answer of the environment cannot be used: {error}") from error

    async def compact(self, session: Session, progress: Progress) -> Ending | None:
        """Let the conversation go on from a summary. Return why the episode ends; None if another turn follows."""
        assert self.compaction is not None and progress.summaries is not None, "a summary was asked for"
        ending, tokens = await self.compaction.write_summary(session)
        progress.summaries.append(tokens)
        return ending

    async def ask(self, function: Callable[..., Any], *arguments: Any, where: str = "") -> Any:
        """Return what a function of the environment returns. `where` begins the reason of a failure.

        Raises:
            EnvironmentFailure: it raised an error, or took longer than `step_timeout_s`.
        """
        return await call_within_limit(function, *arguments, limit_s=self.step_timeout_s, where=where)


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
        for name, value in {**numbers, **parts, **answer.extra}.items():
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
