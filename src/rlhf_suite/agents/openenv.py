"""Environments behind a websocket, in the protocol of OpenEnv: one connection is one episode.

    {"type": "reset", "data": {...}}   {"type": "step", "data": {<action>}}   {"type": "close"}

are answered by {"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}} or {"type": "error",
"data": {"message": ..., "code": ..., "errors": [...]}}; the errors are those of pydantic. The server runs in a Python
environment of its own.
"""

from __future__ import annotations

import json
from contextlib import suppress
from ssl import SSLCertVerificationError
from typing import Any, Literal
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from rlhf_suite.agents.base import Start, Step, Task, Turn
from rlhf_suite.agents.calls import EnvironmentFailure
from rlhf_suite.agents.compat import with_text
from rlhf_suite.agents.model_json import read_json
from rlhf_suite.certificates import certificate_problem
from rlhf_suite.config.declarations.tools import THIS_MACHINE
from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.http_body import BodyError, parse_json

LARGEST = 8 << 20  # bytes of an answer
WRONG_ACTION = "VALIDATION_ERROR"  # the code of an error that the model made
FULL = "CAPACITY_REACHED"  # the code of a server that takes no more sessions


class OpenEnvEnvironment:
    """One episode at a server. `action_key` and `observation_key` are agent.action_key and agent.observation_key."""

    def __init__(self, url: str, action_key: str | None, observation_key: str | None) -> None:
        self.url, self.action_key, self.observation_key = url, action_key, observation_key
        self.socket: ClientConnection | None = None
        self.has_messages = False

    async def reset(self, task: Task) -> Start:
        """Connect, and reset with the label and the columns of the row; the observation is added to the prompt."""
        proxy: Literal[True] | None = None if urlsplit(self.url).hostname in THIS_MACHINE else True
        try:
            self.socket = await connect(self.url, max_size=LARGEST, proxy=proxy)
        except SSLCertVerificationError as error:
            raise EnvironmentFailure(f"{self.url}: {certificate_problem(error)}") from None
        given = await self.ask("reset", {"label": task.label, **task.columns})
        self.has_messages, text = bool(task.messages), self.text(given.get("observation"))
        if not text:
            return Start()
        if self.has_messages:
            return Start(tuple(with_text(task.messages, text)))
        return Start(text=task.text + text)

    async def step(self, turn: Turn) -> Step:
        """Send a turn as an action. One that the server does not take is answered with what is wrong."""
        try:
            given = await self.ask("step", self.action(turn))
        except WrongAction as error:
            return self.make_step(f"Error: {error}")
        reward = given.get("reward")
        if not isinstance(reward, int | float | None):
            raise EnvironmentFailure(f"{self.url}: the reward is {printable(repr(reward), 60)}, not a number")
        return self.make_step(self.text(given.get("observation")), reward, bool(given.get("done")))

    def make_step(self, text: str, reward: float | None = None, done: bool = False) -> Step:
        """Return a step that answers with a text, as a message if the conversation has messages."""
        if self.has_messages:
            return Step.say(text or "(nothing)", reward=reward, done=done)
        return Step(text=text or "\n", reward=reward, done=done)

    def action(self, turn: Turn) -> dict[str, Any]:
        """Return what a turn says as an action: its text under `action_key`, or the JSON object that it is."""
        if self.action_key is not None:
            return {self.action_key: turn.content}
        try:
            value = read_json(turn.content)
        except ValueError as error:
            raise WrongAction(f"the action is not a JSON object: {error}") from None
        if not isinstance(value, dict):
            raise WrongAction("the action is not a JSON object")
        return value

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return the data of the answer to a message."""
        answer = await self.answer(json.dumps({"type": kind, "data": data}))
        content = answer["data"]
        if answer.get("type") == "error":
            message = printable("; ".join([str(content.get("message")), *mistakes(content)]))
            if kind == "step" and content.get("code") == WRONG_ACTION:
                raise WrongAction(message)
            advice = "; let it take agent.max_concurrent sessions" if content.get("code") == FULL else ""
            raise EnvironmentFailure(f"{self.url}: {content.get('code')}: {message}{advice}")
        if answer.get("type") != "observation":
            raise EnvironmentFailure(f"{self.url} answered {printable(str(answer.get('type')))}, not an observation")
        return dict(content)

    async def answer(self, message: str) -> dict[str, Any]:
        """Return the answer to a message, whose `data` is a dict; of a connection that was closed, what the server said
        before."""
        if self.socket is None:
            fix = "call its reset in reset of the environment that holds it"
            raise EnvironmentFailure(f"the environment at {self.url} got a turn before its reset was called: {fix}")
        with suppress(ConnectionClosed):
            await self.socket.send(message)
        try:
            given = parse_json(await self.socket.recv())
        except ConnectionClosed as closed:
            raise EnvironmentFailure(f"{self.url} closed the connection: {closed}") from None
        except BodyError as error:
            raise EnvironmentFailure(f"{self.url}: {error}") from None
        data = (given.get("data") or {}) if isinstance(given, dict) else None
        if not isinstance(data, dict):
            raise EnvironmentFailure(f"{self.url} answered {printable(repr(given), 60)}, not a message of OpenEnv")
        return {**given, "data": data}

    def text(self, observation: Any) -> str:
        """Return the text of an observation: its field `observation_key`, its only text, or all of it as JSON."""
        if self.observation_key is not None:
            if not isinstance(observation, dict) or self.observation_key not in observation:
                raise EnvironmentFailure(f"an observation has no field agent.observation_key={self.observation_key}")
            observation = observation[self.observation_key]
        elif isinstance(observation, dict):
            texts = [value for value in observation.values() if isinstance(value, str)]
            observation = texts[0] if len(texts) == 1 else observation
        if observation is None or observation == {}:
            return ""
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    async def close(self) -> None:
        """End the session."""
        if self.socket is not None:
            await self.socket.send(json.dumps({"type": "close"}))
            await self.socket.close()


def mistakes(data: dict[str, Any]) -> list[str]:
    """Return the mistakes in an action that an error lists: the field of each, and what is wrong with it."""
    listed = data.get("errors") or []
    texts = list[str]()
    for mistake in listed if isinstance(listed, list) else ():
        if isinstance(mistake, dict):
            place = mistake.get("loc")
            texts.append(f"{'.'.join(map(str, place if isinstance(place, list) else ()))}: {mistake.get('msg')}")
    return texts


class WrongAction(Exception):
    """An action that the server does not take; the model is told why."""
