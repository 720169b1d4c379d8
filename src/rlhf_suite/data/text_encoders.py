"""Encoders of text: rows to token ids for supervised tuning, for sampling prompts, and for pre-training on raw text.

A conversation is cut into segments by author: the prompt side (context, role headers, separators) or the model. The
first prompt is tokenised alone, as at inference, and each later segment as it continues the text before it. No token
has two authors, so the mask is exact: where a token of the whole text would reach over a border, both sides are
tokenised up to it (`render.encode_after`).

`mask[t] = 1` if and only if token t is trained on. The first token of a sequence never is, since nothing predicts it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlhf_suite.config.declarations.data import REWARD_TEMPLATE, DataConfig
from rlhf_suite.data.batch import Example
from rlhf_suite.data.images import Image, ImageReader, expand_placeholders, num_places, row_images, with_places
from rlhf_suite.data.messages import (
    Message,
    check_response,
    last_response,
    messages_in,
    messages_of,
    note_unnamed_calls,
    tools_of,
)
from rlhf_suite.data.render import (
    RewardText,
    begin_ids,
    check_rendering,
    columns_text,
    fill,
    label_text,
    pieces,
    text_of,
    tokens,
)
from rlhf_suite.data.row import LeftOut, Row, RowError, join_columns, number, require_value
from rlhf_suite.data.template import ChatTemplate, Turn
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["ConversationEncoder", "Example", "Prompt", "PromptEncoder"]

EACH_ALONE = "one example per response: the chat template renders earlier turns differently"
NO_ROOM = "later responses dropped: their prompts leave no room within data.max_len"


@dataclass(frozen=True)
class Prompt:
    """A prompt to sample from: its n tokens, and what its row says beside it."""

    ids: list[int]  # [n] its tokens, with the begin-of-sequence token where the tokenizer has one
    text: str  # what was tokenised, without the begin-of-sequence token
    label: str  # the right answer, or what else data.label_key has; rules compare responses with it
    datasource: str  # the column `datasource` of the row: which dataset it is from
    where: str  # the file and line of the row, for messages
    columns: str = "{}"  # further columns of the row for the reward (data.reward_columns), as a JSON object
    chat: str = "{}"  # a JSON object: messages and tools that the template rendered, if the encoder keeps them
    images: tuple[Image, ...] | None = None  # in the order of their tokens; None: its data has no images
    teacher_ids: list[int] | None = None  # the tokens that teachers read in its place; None: they read it
    # The following are not stored with it.
    notes: tuple[str, ...] = field(default=(), compare=False)  # for the log
    index: int = field(default=0, compare=False)  # its place among the prompts that a run samples from
    source: str = field(default="", compare=False)  # what metrics call its source; empty where there is only one
    # What rewards read in its place, which does not ask for data.target_reward; None: they read it.
    plain: Prompt | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Segment:
    """A piece of text with one author, and the files of the images that have a place in it."""

    text: str
    trained: bool
    images: tuple[bytes, ...] = ()


class ConversationEncoder:
    """Encodes rows as examples for supervised tuning."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, reader: ImageReader | None = None
    ) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.reader = reader  # of the images of data.image_key
        self.begin = begin_ids(tokenizer) if not config.apply_chat_template else []
        self.rewards = RewardText(config.reward_template)
        if tokenizer.eos_token_id is None:
            raise UserError(
                "actor.model_name_or_path: the tokenizer has no end-of-sequence token, so no response could end"
            )
        check_rendering(tokenizer, config)
        self.template = ChatTemplate(tokenizer, config)
        # The preflight reads the first row to say this; a stage of a loop has its rows from the stage before.
        if config.output_key is None and not config.apply_chat_template and config.turn_markers is None:
            raise UserError(
                "data.output_key is not set: without data.apply_chat_template=true or data.turn_markers the response "
                "is a column of its own"
            )

    def encode(self, row: Row) -> Example | list[Example]:
        """Return ids and mask of a row, or of each response in it.

        Raises:
            RowError: the row cannot be used, with the reason.
        """
        return self._turns(row) if self.config.multiturn else self.encode_last_response(row)

    def encode_last_response(self, row: Row) -> Example:
        """Return ids and mask of a row whose last response is trained on.

        Raises:
            RowError: the row cannot be used, with the reason.
        """
        if self.config.apply_chat_template:
            turn, images = self._last_turn(row)
            return self._example([turn], [len(images)], images, row)
        return self._join(self._plain(row), row.where)

    def _plain(self, row: Row) -> list[Segment]:
        """Return the segments of prompt template and response, without a chat template."""
        if self.config.output_key is None:
            assert self.config.turn_markers is not None
            dialogue = text_of(row, self.config.input_key)
            before, response = last_response(dialogue, self.config.turn_markers, row)
            return [Segment(before, False), Segment(response, True)]
        prompt = self.rewards.prompt(text_of(row, self.config.input_key), self._reward(row))
        prompt = fill(self.config.input_template, prompt)
        return [Segment(prompt, False), Segment(text_of(row, self.config.output_key), True)]

    def _last_turn(self, row: Row) -> tuple[Turn, list[bytes]]:
        """Return the turn whose prompt is the whole conversation and whose response is all messages of `output_key`,
        and the images of the prompt."""
        prompt, response = self._conversation(row)
        prompt, images = self._with_images(prompt, row)
        prompt = self.rewards.messages(prompt, self._reward(row), row)
        for message in response:
            if message["role"] != "assistant":
                raise RowError(
                    row.where,
                    f"the response has a message of role {message['role']!r}: "
                    "only assistant messages can be trained on; data.multiturn=true picks them out",
                )
            check_response(message, row)
        if not prompt:
            raise RowError(row.where, "the prompt is empty")
        tools = tools_of(row, self.config.tools_key)
        turn = self.template.turn(prompt, response, row, tools)
        notes = (*turn.notes, *note_unnamed_calls([*prompt, *response], tools))
        return replace(turn, notes=notes), images

    def _with_images(self, messages: list[Message], row: Row) -> tuple[list[Message], list[bytes]]:
        """Return messages with the places of their images, and the images of the row."""
        if self.reader is None:
            return messages, []
        images = row_images(row, self.config)
        return with_places(messages, len(images), row), images

    def _reward(self, row: Row) -> float | None:
        """Return the reward to write into the prompt, or None."""
        return None if self.config.reward_key is None else number(row, self.config.reward_key)

    def _turns(self, row: Row) -> Example | list[Example]:
        """Return an example in which every assistant message is a response and all text between them is prompt.

        If the template does not render the conversation by appending to the turns before, each response becomes an
        example of its own.
        """
        prompt, response = self._conversation(row)
        messages, images = self._with_images([*prompt, *response], row)
        tools = tools_of(row, self.config.tools_key)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not places:
            raise RowError(row.where, "no assistant message to train on")
        if places[0] == 0:
            raise RowError(row.where, "the conversation begins with an assistant message")
        for place in places:
            check_response(messages[place], row)
        turns = [self.template.turn(messages[:place], [messages[place]], row, tools) for place in places]
        seen = [sum(map(num_places, messages[:place])) for place in places]  # images before each response
        turns[0] = replace(turns[0], notes=(*turns[0].notes, *note_unnamed_calls(messages, tools)))
        grows = all(later.prompt.startswith(turn.prompt + turn.response) for turn, later in pairwise(turns))
        return self._example(turns, seen, images, row) if grows else self._each_alone(turns, seen, images, row)

    def _each_alone(
        self, turns: Sequence[Turn], seen: Sequence[int], images: Sequence[bytes], row: Row
    ) -> list[Example]:
        """Return one example for each turn that fits, at least the first one."""
        examples: list[Example] = []
        for turn, count in zip(turns, seen, strict=True):
            try:
                example = self._example([turn], [count], images, row)
            except LeftOut:
                if not examples:
                    raise
                examples[-1] = replace(examples[-1], notes=(*examples[-1].notes, NO_ROOM))
                break
            examples.append(replace(example, notes=(EACH_ALONE, *example.notes)))
        return examples

    def _example(self, turns: Sequence[Turn], seen: Sequence[int], images: Sequence[bytes], row: Row) -> Example:
        """Return the example of turns, each of which continues where the turn before it ends. The first `seen` of the
        images stand before the response of each turn."""
        segments, done, shown = list[Segment](), 0, 0
        for turn, count in zip(turns, seen, strict=True):
            prompt = Segment(turn.prompt[done:], False, tuple(images[shown:count]))
            segments += [prompt, Segment(turn.response, True)]
            done, shown = len(turn.prompt) + len(turn.response), count
        notes = tuple(note for turn in turns for note in turn.notes)
        return replace(self._join(segments, row.where), notes=notes)

    def _conversation(self, row: Row) -> tuple[list[Message], list[Message]]:
        """Return the prompt messages and the response messages of a row."""
        given = join_columns(row, self.config.input_key)
        if self.config.output_key is not None:
            response = messages_of(require_value(row, self.config.output_key), self.config.output_key, "assistant", row)
            return messages_of(given, self.config.input_key, "user", row), response
        if isinstance(given, str) and self.config.turn_markers is not None:
            given = messages_in(given, self.config.turn_markers, row)
        if isinstance(given, str):
            raise RowError(
                row.where,
                f"column {self.config.input_key!r} is text, not a message list: name the column of the response "
                "(data.output_key; of pairs, data.prompt_key), or data.turn_markers if a text holds the whole dialogue",
            )
        messages = messages_of(given, self.config.input_key, "user", row)
        return messages[:-1], messages[-1:]

    def _join(self, segments: Sequence[Segment], where: str) -> Example:
        """Return the example of tokenised segments: the last response gets its end, and the whole is cut at
        `data.max_len`."""
        ids: list[int] = []
        mask: list[int] = []
        images: list[Image] = []
        encoded = pieces(self.tokenizer, [segment.text for segment in segments], self.begin)
        for index, (segment, piece) in enumerate(zip(segments, encoded, strict=True)):
            if self.reader is not None:
                piece, places = with_images(piece, segment.images, self.reader, len(ids), where)  # noqa: PLW2901
                images += places
            ids += piece
            mask += [int(segment.trained)] * len(piece)
            if not ids:
                raise RowError(where, "the prompt has no tokens, so nothing predicts the first token of the response")
            if index == 0 and len(ids) >= self.config.max_len - 1:
                raise LeftOut(where, f"the prompt leaves no room for a response in data.max_len={self.config.max_len}")
        if ids[-1] != self.tokenizer.eos_token_id:
            ids.append(self.tokenizer.eos_token_id)
            mask.append(1)
        of_row = None if self.reader is None else tuple(images)
        return cut(Example(ids, mask, where, images=of_row), self.config.max_len)


class PromptEncoder:
    """Encodes rows as prompts to sample from."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        keeps_chat: bool = False,
        reader: ImageReader | None = None,
    ) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.reader = reader  # of the images of data.image_key
        self.keeps_chat = keeps_chat  # for agents, which continue the conversation
        self.begin = begin_ids(tokenizer) if not config.apply_chat_template else []
        check_rendering(tokenizer, config)
        self.template = ChatTemplate(tokenizer, config)
        self.target = config.target_reward if config.has("target_reward") else None
        self.rewards = RewardText(config.reward_template if config.has("target_reward") else REWARD_TEMPLATE)
        # A reward judges answers to the question, so it never reads which reward the prompt asks for.
        plain = None if self.target is None else replace(config, target_reward=None)
        self.plain = None if plain is None else PromptEncoder(tokenizer, plain, keeps_chat, reader)

    def encode(self, row: Row) -> Prompt:
        """Return the prompt of a row. A prompt is never cut.

        Raises:
            RowError: the row cannot be used, with the reason.
        """
        messages, tools = self._chat(row) if self.config.apply_chat_template else ([], None)
        files, images = list[bytes](), None
        if self.reader is not None:
            files = row_images(row, self.config)
            messages = with_places(messages, len(files), row)
        text = self.template.text(messages, row, tools, generation_prompt=True) if messages else self._plain(row)
        ids = tokens(self.tokenizer, text, self.begin)
        if self.reader is not None:
            ids, images = with_images(ids, files, self.reader, 0, row.where)
        if len(ids) >= self.config.max_len:
            raise LeftOut(row.where, f"the prompt leaves no room for a response in data.max_len={self.config.max_len}")
        label = "" if self.config.label_key is None else label_text(require_value(row, self.config.label_key))
        source = row.values.get("datasource")
        columns = columns_text(row, self.config.reward_columns)
        chat = json.dumps({"messages": messages, "tools": tools}, default=str) if self.keeps_chat and messages else "{}"
        source = "default" if source is None else str(source)
        of_teachers, notes = self._of_teachers(row), note_unnamed_calls(messages, tools)
        plain = None if self.plain is None else self.plain.encode(row)
        return Prompt(ids, text, label, source, row.where, columns, chat, images, of_teachers, notes, plain=plain)

    def _of_teachers(self, row: Row) -> list[int] | None:
        """Return the tokens of the prompt that teachers read; None where they read that of the policy."""
        data = self.config
        if not data.has("teacher_prompt_key") or (key := data.teacher_prompt_key) is None:
            return None
        if row.values.get(key) is None:
            return None
        own = replace(data, teacher_prompt_key=None, input_key=key)
        return PromptEncoder(self.tokenizer, own, reader=self.reader).encode(row).ids

    def _plain(self, row: Row) -> str:
        """Return the prompt text, without a chat template."""
        prompt = self.rewards.prompt(text_of(row, self.config.input_key), self.target)
        return fill(self.config.input_template, prompt)

    def _chat(self, row: Row) -> tuple[list[Message], list[Any] | None]:
        """Return the messages and tools that the chat template renders."""
        messages = messages_of(join_columns(row, self.config.input_key), self.config.input_key, "user", row)
        if messages[-1]["role"] == "assistant":
            raise RowError(row.where, "the prompt ends with an assistant message, so there is nothing to respond to")
        return self.rewards.messages(messages, self.target, row), tools_of(row, self.config.tools_key)


def build_sft_config(config: DataConfig, input_key: str, output_key: str | None) -> DataConfig:
    """Return the supervised-tuning configuration that encodes column `output_key` as the response to `input_key`."""
    return config.as_of("sft", input_key=input_key, output_key=output_key)


def with_images(
    ids: Sequence[int], images: Sequence[bytes], reader: ImageReader, offset: int, where: str
) -> tuple[list[int], tuple[Image, ...]]:
    """Do as `expand_placeholders` does, with errors of the row at `where`."""
    try:
        return expand_placeholders(ids, images, reader, offset)
    except ValueError as error:
        raise RowError(where, str(error)) from None


def cut(example: Example, max_len: int) -> Example:
    """Return the first `max_len` tokens. No end-of-sequence token is added, since the text did not end there. An image
    is never cut off.

    Raises:
        LeftOut: an image would be cut off.
    """
    if len(example) <= max_len:
        return example
    if example.images and example.images[-1].start + example.images[-1].length > max_len:
        raise LeftOut(example.where, f"an image would be cut off at data.max_len={max_len}")
    return replace(example, ids=example.ids[:max_len], mask=example.mask[:max_len], truncated=True)


class DocumentEncoder:
    """Encodes raw text as windows of at most data.max_len tokens, without template or end-of-sequence token.

    Each window begins with the last token of the window before it, as context. So every token except the first one of
    the document is trained on exactly once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self.tokenizer, self.config, self.begin = tokenizer, config, begin_ids(tokenizer)

    def encode(self, row: Row) -> list[Example]:
        """Return the windows of a document.

        Raises:
            RowError: the text has fewer than two tokens.
        """
        ids = tokens(self.tokenizer, text_of(row, self.config.input_key), self.begin)
        if len(ids) < 2:
            raise RowError(row.where, "the text has only one token, so there is no token to predict")
        length = self.config.max_len
        windows = [ids[start : start + length] for start in range(0, len(ids) - 1, length - 1)]
        return [Example(window, [0] + [1] * (len(window) - 1), row.where) for window in windows]
