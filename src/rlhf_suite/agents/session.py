"""A session: one conversation with the policy, in tokens.

Tokens go in and come out. What the model wrote stays in the ledger as it was sampled, and what others say becomes
tokens once, after it. So the prompt of every request is the ledger at that moment, token by token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from rlhf_suite.agents.base import Episode, Schema, Task, Turn
from rlhf_suite.agents.bridge import ASKED, Bridge
from rlhf_suite.agents.cutting import Cutter, Limits
from rlhf_suite.agents.model_json import canonical
from rlhf_suite.agents.parsing import TurnReader
from rlhf_suite.agents.turn_records import TurnRecorder
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.generation import (
    Generation,
    GenerationRequest,
    SamplingSettings,
    content_number,
    sample_seed,
)
from rlhf_suite.data.images import Image, ImageReader, expand_placeholders, image_file, with_places
from rlhf_suite.data.messages import SET_IMAGES, Message, add_text, join_texts
from rlhf_suite.data.render import tokens
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.rewards.base import Outcome, RewardFailure

REQUESTS = count()


class Policy(Protocol):
    """The engines, as an agent sees them."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the response to one request."""
        ...


@dataclass(frozen=True)
class Shared:
    """What the sessions of a process share."""

    policy: Policy
    bridge: Bridge
    reader: TurnReader
    limits: Limits
    renders_history: bool = False  # agent.history=template
    images: ImageReader | None = None  # None: the run has no images
    max_images: int = 0  # data.max_images_per_prompt: images of a ledger


@dataclass
class Branch:
    """A ledger and the messages that it says. `ends` has, for each turn, how many messages and tokens end there."""

    ledger: Trajectory
    messages: list[Message]
    tools: tuple[Schema, ...]
    prompt_tokens: int
    ends: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Continuation:
    """The prompt of a turn after a conversation: `kept` tokens of a ledger, and others after them."""

    branch: Branch | None  # that knows the beginning; None: all is rendered
    kept: Sequence[int]
    ids: Sequence[int]
    known: Sequence[Message]  # the messages of `kept`
    rest: Sequence[Message]  # those of `ids`


class Session:
    """The only way of an agent to the engines. `ledgers` are those of the episode; the last one that was used is open.

    `seed` are the numbers that the random numbers of the episode depend on.
    """

    def __init__(
        self, shared: Shared, task: Task, ledger: Trajectory, seed: tuple[int, ...], sampling: SamplingSettings
    ) -> None:
        self.policy, self.bridge, self.reader = shared.policy, shared.bridge, shared.reader
        self.limits, self.seed, self.sampling = shared.limits, seed, sampling
        self.renders_history = shared.renders_history
        self.image_reader, self.max_images = shared.images, shared.max_images
        self.cutter = Cutter(shared.bridge.tokenizer, shared.limits)
        self.open = Branch(ledger, list(task.messages), task.tools, len(ledger.ids))
        self.branches = [self.open]
        self.latest = self.open  # the branch with the last turn
        self.num_turns, self.is_full = 0, False
        self.recorder = TurnRecorder()
        # All turns of all samples of a task go to one engine, which has them in its cache.
        self.affinity = content_number(task.ids, task.images)

    @property
    def ledgers(self) -> list[Trajectory]:
        """The ledgers of the episode."""
        return [branch.ledger for branch in self.branches]

    def set_prompt(self, messages: Sequence[Message] | None, text: str | None, tools: Sequence[Schema] = ()) -> bool:
        """Replace the prompt of the episode before the first turn, and return whether a turn fits after it.

        `tools` come beside those of the task. Without messages, text and tools the prompt stays as it is.

        Raises:
            ValueError: this cannot be a prompt, or the chat template does not render it.
        """
        assert not self.num_turns, "the first turn has been sampled"
        branch, ids, files = self.open, None, [image.data for image in self.open.ledger.images]
        if text is not None:
            if messages is not None:
                raise ValueError("it is either a text or messages, not both")
            # A chat template writes the token at the beginning itself.
            ids = tokens(self.bridge.tokenizer, text, () if branch.messages else self.bridge.begin)
            branch.messages = []
        elif messages is not None or tools:
            if not (messages or branch.messages):
                raise ValueError("tools need messages, and so data.apply_chat_template=true")
            if messages is not None:
                branch.messages, files = self.place_images(messages, files)
            branch.tools = (*branch.tools, *tools)
            ids = self.bridge.prompt(branch.messages, branch.tools)
        if ids is not None:
            old = branch.ledger
            ids, images = self.expand_images(ids, files)
            started = Trajectory.start(old.prompt, old.group, old.sample, ids, images)
            branch.ledger = replace(started, greedy=old.greedy, role=old.role, extra=old.extra)
            branch.prompt_tokens = len(ids)
        self.is_full = self.room() < 1 or len(branch.ledger.images) > self.max_images
        return not self.is_full

    def room(self) -> int:
        """Return how many tokens fit into the open ledger."""
        return self.limits.room(self.open.prompt_tokens, len(self.open.ledger.ids))

    async def reply(
        self, stop: Sequence[str] | None = None, max_new_tokens: int | None = None, *, counts: bool = True
    ) -> Turn:
        """Let the model write the next turn, of at most `max_new_tokens`. `stop`: strings that end it; None: those of
        rollout.stop. `counts`: it is a turn of the episode, not the rest of one that ended at a stop string, nor a
        summary."""
        turn = self.start_turn(stop, max_new_tokens)
        self.num_turns -= not counts
        return await turn

    def start_turn(
        self, stop: Sequence[str] | None = None, max_new_tokens: int | None = None
    ) -> Coroutine[None, None, Turn]:
        """Do as `reply` does, with the open ledger as it is at this call, whatever is opened before the turn ends."""
        ledger = self.open.ledger
        assert not self.is_full, "there is no room for a token"
        request = GenerationRequest(
            id=next(REQUESTS),
            prompt_ids=ledger.ids.tolist(),
            max_new_tokens=min(self.room(), max_new_tokens or self.room()),
            seed=self.next_seed(),
            sampling=self.sampling if stop is None else replace(self.sampling, stop=tuple(stop)),
            affinity=self.affinity,
            images=ledger.images,
        )
        self.num_turns += 1
        return self.write_turn(self.open, request, self.recorder.ask(ledger))

    async def write_turn(self, branch: Branch, request: GenerationRequest, asked: float) -> Turn:
        """Return the turn that the model writes in a branch. `asked`: when it was asked for."""
        # An episode that ends while it waits leaves its request alone: others may be in the same bundle.
        generation = await asyncio.shield(self.policy.generate(request))
        turn, ledger = self.reader.turn(generation, request.prompt_ids, branch.tools), branch.ledger
        ledger.append_model(generation.ids, generation.log_probs, generation.versions, generation.routes)
        ledger.ending = Ending.of_response(generation.finish_reason)
        self.recorder.write(ledger, turn, asked)
        branch.messages.append(turn.message())
        branch.ends.append((len(branch.messages), len(ledger.ids)))
        self.latest = branch
        self.is_full = self.room() < 1
        return turn

    def next_seed(self) -> int:
        """Return the seed of the next turn: of the first one that of the episode, of others also a function of the
        number of tokens, since a seed that is used again gives the same random numbers again."""
        place = (self.open.ledger.fork, len(self.open.ledger.ids)) if self.num_turns else ()
        return sample_seed(*self.seed, *place)

    def observe(self, answers: Sequence[Message], request: str | None = None) -> bool:
        """Append messages of tools and of the user after a turn, and return whether another turn fits. `request`: what
        the user asks for after them, which is not cut.

        If it does not, or the end of the turn does not let the conversation go on, nothing is appended.
        """
        assert self.num_turns, "begin() takes the messages before the first turn"
        answers, files = self.place_images(self.cutter.cut_all(answers))

        def whole(shown: Sequence[Message]) -> Sequence[Message]:
            return shown if request is None else add_text(shown, request)

        if self.renders_history:
            return self.render_again(answers, whole)
        stop, tools = int(self.open.ledger.ids[-1]), self.open.tools
        room, after = self.room(), self.bridge.after
        answers = whole(self.cutter.fit_messages(answers, room, lambda shown: after(stop, whole(shown), tools)))
        return self.append(after(stop, answers, tools), answers, files)

    def place_images(
        self, messages: Sequence[Message], known: Sequence[bytes] = ()
    ) -> tuple[list[Message], list[bytes]]:
        """Return messages with the places of their images, and the files of these. Items without an image stand for
        the `known` ones, in order.

        Raises:
            ValueError: an item holds no image, or the run has none.
        """
        if self.image_reader is None:
            return [join_texts(message) for message in messages], []
        contents = [message["content"] for message in messages if isinstance(message.get("content"), list | tuple)]
        items = [item for content in contents for item in content if item["type"] == "image"]
        left = iter(known)
        files = [image_file(item["image"]) if "image" in item else next(left, b"") for item in items]
        return with_places(messages, len(files), ASKED), files

    def expand_images(
        self, ids: Sequence[int], files: Sequence[bytes], offset: int = 0
    ) -> tuple[list[int], tuple[Image, ...]]:
        """Return ids with the tokens of the images `files`, and where these are."""
        return (
            (list(ids), ()) if self.image_reader is None else expand_placeholders(ids, files, self.image_reader, offset)
        )

    def render_again(self, answers: Sequence[Message], whole: Callable[[Sequence[Message]], Sequence[Message]]) -> bool:
        """Continue with a rendering of the whole conversation, which goes on with `whole(answers)`, and return whether
        a turn fits after it. Where it begins with the tokens of the open ledger, these go on; otherwise a new ledger
        begins with it."""
        before, tools, most = self.open.messages, self.open.tools, self.limits.max_len
        answers = self.cutter.fit_messages(
            answers, most, lambda shown: self.bridge.prompt([*before, *whole(shown)], tools)
        )
        messages = [*before, *whole(answers)]
        ids = self.bridge.prompt(messages, tools)
        known = self.open.ledger.ids.tolist()
        if ids[: len(known)] == known:
            return self.append(ids[len(known) :], messages[len(self.open.messages) :])
        return self.fork(ids, messages, self.open.tools)

    def observe_text(self, text: str, before: str = "", after: str = "", images: Sequence[Any] = ()) -> bool:
        """Append raw text after a turn, and return whether another turn fits. `before` and `after` are never cut.
        `images`: those of the placeholders in the text.

        Raises:
            ValueError: the run has no images, or one of these cannot be read.
        """
        if images and self.image_reader is None:
            raise ValueError(f"it has images, and the policy reads text: {SET_IMAGES}")
        files = [image_file(image) for image in images]
        ids = self.open.ledger.ids.tolist()

        def encode(texts: Sequence[str]) -> list[int]:
            return self.bridge.behind(ids, before + texts[0] + after)

        return self.append(encode(self.cutter.fit([self.cutter.cut(text)], self.room(), encode)), (), files)

    def append(self, ids: Sequence[int] | None, messages: Sequence[Message], files: Sequence[bytes] = ()) -> bool:
        """Append tokens of the environment, with `files` in place of their image placeholders, if another token and
        these images fit."""
        images, ledger = tuple[Image, ...](), self.open.ledger
        if ids is not None:
            ids, images = self.expand_images(ids, files, len(ledger.ids))
        has_many = len(images) > 0 and len(ledger.images) + len(images) > self.max_images
        self.is_full = ids is None or has_many or len(ids) >= self.room()
        if ids is not None and not self.is_full:
            ledger.append_environment(ids, images)
            self.open.messages += messages
        return not self.is_full

    def continue_from(self, messages: Sequence[Message], tools: Sequence[Schema] | None = None) -> bool:
        """Continue the conversation `messages` where it is known, and return whether a turn fits after it. If none
        does, nothing changes. `tools`: those of the conversation; None: those of the open ledger.

        The longest known beginning that ends with a turn of the model keeps its tokens. If that turn is the last one of
        a ledger, the rest is appended; otherwise a new ledger begins, whose prompt holds these tokens. Where nothing is
        known, or what is known cannot be continued, the new ledger begins with a rendering of all messages.

        Raises:
            RowError: the chat template does not render the conversation.
        """
        tools = self.open.tools if tools is None else tuple(tools)
        continuation = self.find_continuation(messages, tools)
        branch = continuation.branch
        if branch is None or len(continuation.kept) < len(branch.ledger.ids):
            return self.fork([*continuation.kept, *continuation.ids], [*continuation.known, *continuation.rest], tools)
        before, self.open = self.open, branch
        if not self.append(continuation.ids, continuation.rest):
            self.open = before
        return not self.is_full

    def find_continuation(self, messages: Sequence[Message], tools: Sequence[Schema]) -> Continuation:
        """Return the prompt of a turn after a conversation, as `continue_from` would make it; nothing changes.

        Raises:
            RowError: the chat template does not render the conversation.
        """
        branch, end, length = self.find_known(messages, tools)
        rest, ids = messages[end:], None
        if branch is not None:
            stop, is_last = int(branch.ledger.ids[length - 1]), length == len(branch.ledger.ids)
            room = self.limits.room(branch.prompt_tokens if is_last else length, length)
            shown = self.cutter.fit_messages(
                self.cutter.cut_all(rest), room, lambda answers: self.bridge.on_from(stop, answers, tools)
            )
            ids = self.bridge.on_from(stop, shown, tools)
        if branch is None or ids is None:
            return Continuation(None, [], self.bridge.prompt(messages, tools), [], messages)
        # The messages stay whole: the next request repeats them, and is compared with them.
        return Continuation(branch, branch.ledger.ids[:length].tolist(), ids, messages[:end], rest)

    def find_known(self, messages: Sequence[Message], tools: Sequence[Schema]) -> tuple[Branch | None, int, int]:
        """Return the branch that knows the longest beginning of a conversation, how many messages that is, and the
        number of its tokens."""
        best: tuple[Branch | None, int, int] = (None, 0, 0)
        asked = [normal(message) for message in messages]
        for branch in self.branches:
            if branch.tools != tuple(tools):
                continue
            said = [normal(message) for message in branch.messages]
            for end, length in branch.ends:
                if end > best[1] and end < len(asked) and said[:end] == asked[:end]:
                    best = (branch, end, length)
        return best

    def fork(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        tools: tuple[Schema, ...],
        images: tuple[Image, ...] = (),
    ) -> bool:
        """Begin a new ledger with this prompt. What the model wrote of it is trained on in the ledger where it was
        sampled."""
        first = self.branches[0].ledger
        ledger = Trajectory.start(first.prompt, first.group, first.sample, ids, images)
        ledger.fork = len(self.branches) if self.num_turns else 0
        ledger.greedy, ledger.role = first.greedy, first.role
        self.is_full = self.limits.room(len(ids), len(ids)) < 1
        if not self.is_full:
            self.open = Branch(ledger, list(messages), tools, len(ids))
            if not self.num_turns:  # it replaces the prompt of the task
                self.branches, self.latest = [], self.open
            self.branches.append(self.open)
        return not self.is_full

    def forget(self, branch: Branch, end: tuple[int, int]) -> None:
        """Remove the last turn of a branch, `end` of its `ends`, from what is trained on."""
        assert branch.ends[-1] == end and branch is not self.latest, "a turn that something follows"
        branch.ends.pop()
        if branch.ends:
            branch.ledger = branch.ledger.cut(branch.ends[-1][1])

    def episode(
        self,
        outcome: Outcome | None = None,
        ending: Ending = Ending.FINISHED,
        extra: dict[str, float] | None = None,
    ) -> Episode:
        """Return the episode as it is now: the ledgers with a turn, or the first one.

        `ending` is why the agent asks for no further turn. A failure in `outcome` comes before it, and so does a last
        turn that was cut off.
        """
        ledger = self.latest.ledger
        if isinstance(outcome, RewardFailure):
            ledger.ending = Ending.TIMED_OUT if outcome.kind == "timeout" else Ending.FAILED
        elif ledger.ending is not Ending.CUT:
            ledger.ending = ending
        self.recorder.close([branch for branch in self.branches if branch.ends])
        others = [branch.ledger for branch in self.branches if branch.ends and branch is not self.latest]
        return Episode([*others, ledger], outcome, extra or {})


def normal(message: Message) -> tuple[object, ...]:
    """Return what identifies a message in a conversation: its role, text and calls, not its ids and reasoning. A client
    may write the arguments of a call in another order, and JavaScript writes 1.0 as 1."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    said = tuple((call["name"], canonical(call["arguments"])) for call in calls)
    return message["role"], str(message.get("content") or "").strip(), said
