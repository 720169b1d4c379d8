"""The words of agents. An episode is one try at a task; turns of the model and steps of an environment alternate in it.

    class GuessTheNumber:
        async def reset(self, task: Task) -> Start:
            self.secret = int(task.label)
            return Start()

        async def step(self, turn: Turn) -> Step:
            right = turn.content.strip() == str(self.secret)
            return Step(reward=1.0, done=True) if right else Step.say("wrong, try again")

        async def close(self) -> None: ...

An environment sees text and messages, never tokens. Tokens are the matter of `session.Session`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_suite.data.ending import Ending
from rlhf_suite.data.messages import Message
from rlhf_suite.rewards.base import Outcome

if TYPE_CHECKING:  # a user's file that imports this one is tried before a run, which must not import torch for that
    import numpy as np
    from numpy.typing import NDArray

    from rlhf_suite.data.images import Image
    from rlhf_suite.data.text_encoders import Prompt
    from rlhf_suite.data.trajectory import Trajectory

Schema = dict[str, Any]  # a tool, as chat templates describe it: {"type": "function", "function": {"name": ...}}


@dataclass(frozen=True)
class Task:
    """One prompt with all that its row says, as an environment sees it."""

    ids: Sequence[int]  # the tokens of the prompt
    text: str  # the text that these tokens stand for
    messages: tuple[Message, ...] = ()  # the conversation so far; empty where no chat template is applied
    tools: tuple[Schema, ...] = ()  # the tools that the row names (data.tools_key)
    label: str = ""  # the right answer, or what else data.label_key has
    datasource: str = "default"  # which dataset the row is from
    columns: dict[str, Any] = field(default_factory=dict)  # further columns of the row (data.reward_columns)
    images: tuple[Image, ...] = ()  # the images of the prompt, in order; `image.data` is the file

    @classmethod
    def of(cls, prompt: Prompt) -> Task:
        """Return the task of an encoded prompt."""
        chat = json.loads(prompt.chat)
        return cls(
            prompt.ids,
            prompt.text,
            tuple(chat.get("messages", ())),
            tuple(chat.get("tools") or ()),
            prompt.label,
            prompt.datasource,
            json.loads(prompt.columns),
            prompt.images or (),
        )


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model wrote. One with a `problem` is answered with it, and never executed."""

    id: str  # which answer belongs to which call
    name: str  # of the tool
    arguments: dict[str, Any] = field(default_factory=dict)  # values by the names of the tool's arguments
    problem: str | None = None  # why it cannot be executed: it is not JSON, it was cut off, ...


@dataclass(frozen=True)
class Turn:
    """What the model wrote at once: its tokens, and what these say. The session makes it, never a user."""

    ids: NDArray[np.int64]  # [n], the tokens as they were sampled
    text: str  # all that they say, without special tokens
    content: str  # the text without the reasoning and the calls in it: the answer
    reasoning: str = ""  # what the model thought before it answered
    calls: tuple[ToolCall, ...] = ()  # the tools that it calls, in order
    finish: str = "stop"  # the model ended it; "length": a limit cut it off

    @property
    def is_cut(self) -> bool:
        """Whether the length limit ended it: nothing of it is executed."""
        return self.finish == "length"

    def message(self) -> Message:
        """Return the turn as a message of a conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True)
class Start:
    """How an environment begins an episode: the prompt, where it differs from the task's own, and the tools."""

    messages: tuple[Message, ...] | None = None  # the whole conversation; None: the task's own
    text: str | None = None  # the whole prompt of a run without a chat template; None: the task's own
    tools: tuple[Schema, ...] = ()  # tools beside those of the task, which the model is told of


@dataclass(frozen=True)
class Step:
    """What an environment answers to a turn.

    With a chat template it answers with messages (user, tool), without one with raw text. In a run with images the
    content of a message may be a list, with an item {"type": "image", "image": <Pillow image, bytes or path>} for each
    image. A step without messages and text ends the episode, as `done` does.

    The reward of the last step is that of the episode, and those of earlier steps belong to their turns. A reward may
    be a dict of named parts, each of which is logged as its sum over the episode; the flags reward.reward_key and
    reward.combine say what of it is trained on. If no step has a reward, the reward sources of the run score the
    episode.
    """

    messages: tuple[Message, ...] = ()  # what the model sees next, in a run with a chat template
    text: str | None = None  # what the model sees next, in a run without one
    reward: float | Mapping[str, float] | None = None  # of the turn; None: no reward (yet)
    done: bool = False  # the episode is over
    score: float | None = None  # how good the episode was, 0 to 1, which evaluations count; None: its rewards' sum
    role: str | None = None  # who speaks next and sees the answer, in an environment with roles
    rewards: Mapping[str, float] = field(default_factory=dict)  # of each role, in an environment with roles
    extra: dict[str, float] = field(default_factory=dict)  # numbers to log, by name
    images: Sequence[Any] = ()  # images whose placeholders, as the tokenizer writes them, stand in `text`

    @classmethod
    def say(cls, text: str, **others: Any) -> Step:
        """Return a step that answers with one message of the user."""
        return cls(({"role": "user", "content": text},), **others)


class Environment(Protocol):
    """The world of one episode.

    One whose class has `roles`, a tuple of names, is a game of several: `reset(task)` returns a dict with a Start for
    each role, the first of which speaks first, and `step(role, turn)` says who speaks next (docs/agents_roles.md).

    One that knows the reward only when all is over may also have a method `last_step()`. It is called once for each
    episode, whether the environment, the model or a limit ended it, and returns a Step of which only the numbers count.
    """

    async def reset(self, task: Task) -> Start:
        """Begin the episode of a task."""
        ...

    async def step(self, turn: Turn) -> Step:
        """Answer a turn of the model. One that was cut off at the length limit is the last one."""
        ...

    async def close(self) -> None:
        """Give back what the episode holds. Called once, however the episode ended."""
        ...


@dataclass(frozen=True)
class Episode:
    """One try at a task. Each token that the model wrote is the model's in exactly one of the ledgers.

    Of an episode with roles this is what one role has, and `others` is what the others have.
    """

    ledgers: list[Trajectory]  # its tokens; the ledger with the last turn stands last
    outcome: Outcome | None = None  # its reward, or why it has none; None: the reward sources of the run score it
    extra: dict[str, float] = field(default_factory=dict)  # numbers to log, by name
    others: tuple[Episode, ...] = ()  # of the other roles

    @property
    def ending(self) -> Ending:
        """Why there is no further turn, which the last ledger says."""
        return self.ledgers[-1].ending
