"""The agent of a program that asks for turns over HTTP: it gets a URL and a key for each episode, and reports a reward.

A request is matched with what the model has written in the episode. Where it continues that, the tokens are kept and
the rest is appended; where the program edited or replaced the history, a new ledger begins (`session.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rlhf_suite.agents.base import Episode, Task, Turn
from rlhf_suite.agents.calls import call
from rlhf_suite.agents.command import ALL_ENDS_S, Command, ProgramFailure
from rlhf_suite.agents.program_loop import program_loop
from rlhf_suite.agents.request import TOO_LONG, ChatRequest, Completion, Refused, message_to_send, with_names
from rlhf_suite.agents.session import Branch, Session, normal
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.messages import Message
from rlhf_suite.data.row import RowError
from rlhf_suite.foreign_text import describe, printable
from rlhf_suite.rewards.base import Choice, Outcome, PartsError, RewardFailure, Scored
from rlhf_suite.rewards.reply import check_names
from rlhf_suite.waits import waiting

Key = tuple[tuple[tuple[object, ...], ...], str]  # the messages of a request; its tools, max_tokens and stop
RESULT = ("reward", "score", "metrics", "error")


@dataclass(eq=False)
class Asked:
    """A request that the model answers, or has answered."""

    branch: Branch
    number: int  # of the turn in its episode
    work: asyncio.Task[Completion] | None = None
    end: tuple[int, int] | None = None  # of the turn in its branch; None: it is being written
    is_continued: bool = False  # a later request has the turn in its history


class ChatSession:
    """The conversations of an episode. All calls but those of `address` must be made on the event loop of the engines.

    `max_characters`: a longer conversation has more tokens than a ledger, and is not even tokenised.
    """

    def __init__(
        self, session: Session, max_turns: int, max_characters: int, choice: Choice, overrides: bool = False
    ) -> None:
        self.session, self.max_turns, self.max_characters = session, max_turns, max_characters
        self.overrides = overrides  # agent.sampling: what clients ask of the sampling has no effect
        self.choice = choice  # of the parts of a reward
        self.id, self.key = secrets.token_hex(8), secrets.token_urlsafe(24)
        self.loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self.loop.create_future()  # of the engines: it ends the run
        self.asked: dict[Key, list[Asked]] = {}
        self.answered: dict[str, tuple[Message, ...]] = {}  # conversations up to a turn, by `Completion.id`
        self.limit: Ending | None = None  # that made a request fail
        self.report: Scored | RewardFailure | None = None
        self.is_over, self.refused = False, ""  # why the last request that was refused was so
        self.retries = self.calls = self.problems = 0

    async def answer(self, request: ChatRequest, is_retry: bool) -> Completion:
        """Return the turn that follows a conversation. A request that the client sends again gets the same answer.

        Raises:
            Refused: there is no room for a turn, or the episode is over.
        """
        request = self.with_history(request)
        self.check_characters(request)
        key = tuple(map(normal, request.messages)), repr((request.tools, request.max_tokens, request.stop))
        if is_retry and (before := self.asked.get(key)):
            self.retries += 1
            asked = before[-1]
        else:
            asked = self.start_turn(request)
            self.asked.setdefault(key, []).append(asked)
        assert asked.work is not None
        return await asyncio.shield(asked.work)

    def with_history(self, request: ChatRequest) -> ChatRequest:
        """Return a request with the whole conversation, also where it names the answer that it goes on from."""
        own, known = request.instructions, () if request.previous is None else self.answered.get(request.previous)
        if known is None:
            raise Refused("previous_response_id names no answer of this episode", code="previous_response_not_found")
        return replace(request, messages=with_names((*request.messages[:own], *known, *request.messages[own:])))

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of the prompt of a turn after a conversation."""
        request = self.with_history(request)
        self.check_characters(request)
        try:
            continuation = self.session.find_continuation(request.messages, request.tools)
        except RowError as error:
            raise Refused(f"the chat template does not render this conversation: {error.reason}") from error
        return len(continuation.kept) + len(continuation.ids)

    def start_turn(self, request: ChatRequest) -> Asked:
        """Let the model write a turn after a conversation."""
        session = self.session
        if self.is_over:
            raise Refused("the episode is over", 410, "episode_over")
        if session.num_turns >= self.max_turns:
            self.limit = Ending.TURNS
            raise Refused(f"the episode has had agent.max_turns={self.max_turns} turns", 400, "max_turns")
        branch, end, _ = session.find_known(request.messages, request.tools)
        try:
            fits = session.continue_from(request.messages, request.tools)
        except RowError as error:
            raise Refused(f"the chat template does not render this conversation: {error.reason}") from error
        if not fits:
            raise self.too_long("the conversation leaves no room for a turn in data.max_len, or rollout.max_new_tokens")
        for asked in (asked for several in self.asked.values() for asked in several):
            if asked.branch is branch and asked.end is not None and asked.end[0] == end:
                asked.is_continued = True
        self.limit, self.refused = None, ""  # the program has found a way to go on
        prompt_ids = session.open.ledger.ids.tolist()
        writing = session.start_turn(request.stop, request.max_tokens)
        asked = Asked(session.open, session.num_turns)
        asked.work = asyncio.create_task(self.write(asked, request, prompt_ids, writing))
        return asked

    def check_characters(self, request: ChatRequest) -> None:
        """Refuse a conversation that is too long even if each token were the longest one. What agent.cut_to_fit would
        cut does not count."""
        messages = request.messages
        if self.session.limits.cut_to_fit is not None:
            branch, end, _ = self.session.find_known(messages, request.tools)
            messages = messages if branch is None else messages[:end]
        count = sum(map(characters, messages))
        if count > self.max_characters:
            raise self.too_long(f"the conversation has {count} characters, too many for the tokens of data.max_len")

    def too_long(self, message: str) -> Refused:
        """Return the answer to a conversation without room for a turn."""
        self.limit = Ending.FULL
        return Refused(message, 400, TOO_LONG)

    async def write(
        self, asked: Asked, request: ChatRequest, prompt_ids: Sequence[int], writing: Coroutine[None, None, Turn]
    ) -> Completion:
        """Return the turn that is being written. A failure of the engines fails the whole run."""
        try:
            turn = await writing
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise Refused("the run has failed", 410, "run_failed") from None
        branch = asked.branch
        asked.end = branch.ends[-1]
        stop = self.session.sampling.stop if request.stop is None else request.stop
        message, ended_by = message_to_send(turn, request, stop, self.calls)
        branch.messages[-1] = message
        is_call = "tool_calls" in message
        self.calls += len(message.get("tool_calls", ()))
        self.problems += sum(call.problem is not None for call in turn.calls)
        completion = Completion(
            asked.number,
            message,
            "length" if turn.is_cut else "tool_calls" if is_call else "stop",
            prompt_ids,
            turn.ids.tolist(),
            branch.ledger.engine_log_probs[-len(turn.ids) :].tolist() if len(turn.ids) else [],
            ended_by,
        )
        self.answered[completion.id] = (*request.messages[request.instructions :], message)
        return completion

    def complete(self, result: Mapping[str, Any]) -> None:
        """Take the result that a program reports over HTTP."""
        if self.is_over:
            raise Refused("the episode is over", 410, "episode_over")
        try:
            self.report = outcome_of(dict(result), self.choice)
        except ValueError as error:
            raise Refused(str(error)) from error

    def end(self) -> int:
        """End the conversations, and return the number of orphans: turns of requests that were sent several times,
        of which the program used another one. They are not trained on."""
        self.is_over = True
        orphans = [asked for several in self.asked.values() for asked in self.find_unused(several)]
        for asked in (asked for several in self.asked.values() for asked in several):
            if asked.work is not None:
                asked.work.cancel()
        for orphan in orphans:
            assert orphan.end is not None
            self.session.forget(orphan.branch, orphan.end)
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()
        return len(orphans)

    def find_unused(self, siblings: Sequence[Asked]) -> list[Asked]:
        """Return which turns of equal requests the program did not go on with. Where it did with none, the last one
        counts as used."""
        written = [sibling for sibling in siblings if sibling.end is not None]
        last = self.session.latest
        used = [
            sibling
            for sibling in written
            if sibling.is_continued or (sibling.branch is last and sibling.end == last.ends[-1])
        ]
        used = used or written[-1:]
        return [sibling for sibling in written if sibling not in used]


def characters(message: Message) -> int:
    """Return about how many characters a chat template writes for a message: its text, its calls, and one more."""
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    thoughts = len(str(message.get("reasoning_content", "")))
    return 1 + len(str(message["content"])) + thoughts + sum(map(len, map(repr, calls)))


class Sessions(Protocol):
    """Where programs reach the sessions. What commands print is kept in the folder `logs`."""

    logs: Path | None

    def open(self, chat: ChatSession) -> str:
        """Return the base URL of a session."""
        ...

    def close(self, chat: ChatSession) -> None:
        """Answer no further request of a session."""
        ...


@dataclass
class EndpointAgent:
    """Runs the episodes of a user's program: a function `run_agent(task, base_url, api_key)`, or a command."""

    program: Callable[[Task, str, str], Any] | Command
    sessions: Sessions
    max_turns: int
    timeout_s: float
    max_characters: int
    must_score: bool = field(default=False, kw_only=True)  # nobody else does
    choice: Choice = field(default_factory=Choice, kw_only=True)  # of the parts of a reward
    overrides: bool = field(default=False, kw_only=True)  # agent.sampling

    @property
    def name(self) -> str:
        """What messages call the program."""
        return "agent.command" if isinstance(self.program, Command) else "run_agent"

    def limit_turns(self, max_turns: int) -> EndpointAgent:
        """Return the same agent with at most so many turns in an episode."""
        return replace(self, max_turns=max_turns)

    async def run(self, task: Task, session: Session) -> Episode:
        """Run one episode. An error of the program is its outcome; an error of the policy is raised."""
        chat = ChatSession(session, self.max_turns, self.max_characters, self.choice, self.overrides)
        url = self.sessions.open(chat)
        ending = Ending.FINISHED
        outcome: Outcome | None
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                with waiting("run_agent of an episode", limit_s=self.timeout_s, flag="agent.timeout_s"):
                    outcome = self.check_outcome(await self.run_program(task, url, chat), chat)
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = f"the episode was not finished after agent.timeout_s={self.timeout_s:g}"
            outcome = RewardFailure(f"{reason} ({session.num_turns} turns)", "timeout")
        except ProgramFailure as error:
            outcome = RewardFailure(str(error), "error")
            if chat.limit is not None and session.num_turns:  # nobody had paid until the limit
                ending, outcome = chat.limit, Scored(0.0, 0.0) if self.must_score else None
        finally:
            self.sessions.close(chat)
            orphans = chat.end()
        counts = {
            "turns": session.num_turns,
            "calls": chat.calls,
            "malformed_calls": chat.problems,
            "ledgers": sum(bool(branch.ends) for branch in session.branches),
            "orphans": orphans,
            "retries": chat.retries,
        }
        metrics = {f"agent/{name}": float(value) for name, value in counts.items()}
        return session.episode(outcome, ending, (outcome.extra if isinstance(outcome, Scored) else {}) | metrics)

    async def run_program(self, task: Task, url: str, chat: ChatSession) -> Any:
        """Return what the program returns. It runs in a thread of its own, or if it is a coroutine function on the
        loop of all of them.

        Raises:
            ProgramFailure: the program raised an error.
        """

        program, of_command = self.program, None
        if isinstance(program, Command):
            name = f"{chat.session.latest.ledger.group}-{chat.session.latest.ledger.sample}-{chat.id}"
            of_command = program.run(task, url.removesuffix("/v1"), chat.key, name)

        def work() -> Any:
            assert not isinstance(program, Command)
            result = program(task, url, chat.key)
            return program_loop().run(result) if inspect.iscoroutine(result) else result

        running = asyncio.ensure_future(call(work) if of_command is None else of_command)
        try:
            await asyncio.wait((running, chat.failed), return_when=asyncio.FIRST_COMPLETED)
            if chat.failed.done():
                chat.failed.result()  # no-limit: it is done
            return running.result()  # no-limit: it is done
        except Exception as error:
            if chat.failed.done():
                raise
            why = f" (the endpoint had said: {chat.refused})" if chat.refused else ""
            if of_command is not None and not (why or chat.session.num_turns):
                why = " (before any turn of the model)"
            said = str(error) if isinstance(error, ProgramFailure) else f"{self.name} failed: {describe(error)}"
            raise ProgramFailure(f"{said}{why}") from error
        finally:
            running.cancel()
            if of_command is not None:
                await asyncio.wait((running,), timeout=ALL_ENDS_S)  # what a command has started ends with the episode

    def check_outcome(self, returned: Any, chat: ChatSession) -> Outcome | None:
        """Return the outcome of an episode: what the program returned, else what it reported, else None."""
        try:
            outcome = chat.report if returned is None else outcome_of(returned, self.choice)
        except ValueError as error:
            raise ProgramFailure(f"{self.name} returned {error}") from error
        if isinstance(outcome, Scored) and not chat.session.num_turns and chat.limit is None:
            why = f"the endpoint had said: {chat.refused}" if chat.refused else "its requests must go to base_url"
            raise ProgramFailure(f"{self.name} returned a reward without a turn of the model; {why}")
        if isinstance(self.program, Command) and outcome is None and chat.limit is None and not chat.session.num_turns:
            said = f"; the endpoint had said: {chat.refused}" if chat.refused else ""
            raise ProgramFailure(f"{self.name} ended without a turn of the model{said}")
        if outcome is None and self.must_score:
            raise ProgramFailure(f"{self.name} returned no reward, and the run has no reward source")
        return outcome


def outcome_of(result: Any, choice: Choice) -> Scored | RewardFailure | None:
    """Return the outcome in a reward, or in {reward, score, metrics, error}; None without a reward. A reward is a
    number, or an object of named parts.

    Raises:
        ValueError: it is something else.
    """
    given = result if isinstance(result, dict) else {"reward": result}
    if unknown := [name for name in given if name not in RESULT]:
        raise ValueError(f"{unknown[0]!r}; the names are {', '.join(RESULT)}")
    if given.get("error"):
        return RewardFailure(str(given["error"]), "error")
    extra, reward, score = numbers(given.get("metrics") or {}, "metrics"), given.get("reward"), given.get("score")
    if reward is None:
        if score is not None or extra:
            raise ValueError("a score or metrics without a reward")
        return None
    parts = numbers(reward, "reward") if isinstance(reward, dict) else number(reward, "reward")
    try:
        return choice.make_scored(parts, None if score is None else number(score, "score"), extra)
    except PartsError as error:
        raise ValueError(str(error)) from error


def numbers(given: Any, name: str) -> dict[str, float]:
    """Return an object of finite numbers."""
    if not isinstance(given, dict):
        raise ValueError(f"{name}={printable(repr(given), 60)}, not an object of numbers")
    check_names("the program", name, given)
    return {str(key): number(value, str(key)) for key, value in given.items()}


def number(value: Any, name: str) -> float:
    """Return a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"{name}={value!r}, not a finite number")
    return number
