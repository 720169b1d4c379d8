"""Solutions in steps, each of which ends in a placeholder token: with labels for training a process reward model (PRM),
and without labels for scoring by a trained one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.batch import Example
from rlhf_suite.data.messages import messages_of, tools_of
from rlhf_suite.data.render import begin_ids, check_rendering, encode_after, fill, text_of, tokens
from rlhf_suite.data.row import LeftOut, Row, RowError, join_columns, require_value
from rlhf_suite.data.template import ChatTemplate
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BLANK_STEP = "a blank step dropped with its label, as in scoring"


class StepEncoder:
    """Encodes rows as sequences whose mask is 1 at the placeholders. Two numbers of these tokens are the training
    targets:

    `target`   the index of a reward token (with algo.reward_tokens=null: of a token of the vocabulary)
    `weight`   its probability, 1 for hard labels; the rest is the probability of the other of two reward tokens
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, algo: AlgoConfig) -> None:
        self.tokenizer, self.config, self.names = tokenizer, config, algo.reward_tokens
        self.begin = begin_ids(tokenizer) if not config.apply_chat_template else []
        check_rendering(tokenizer, config)
        self.template = ChatTemplate(tokenizer, config)
        self.mark, self.placeholder = (
            algo.placeholder_token,
            self.token_id(algo.placeholder_token, "algo.placeholder_token"),
        )
        self.columns = (
            None if self.names is None else [self.token_id(name, "algo.reward_tokens") for name in self.names]
        )

    def token_id(self, text: str, flag: str) -> int:
        """Return the id of a text that is one token.

        Raises:
            UserError: the text is not one token.
        """
        ids = tokens(self.tokenizer, text)
        if len(ids) != 1:
            raise UserError(f"{flag}: {text!r} is {len(ids)} tokens of this tokenizer. Choose a text that is one token")
        return ids[0]

    def encode(self, row: Row) -> Example:
        """Return the example of a row, cut at data.max_len.

        Label k stays with placeholder k; labels of placeholders after the cut are dropped.

        Raises:
            RowError: the row cannot be used, with the reason.
        """
        labels, notes = require_value(row, self.config.column("label_key")), tuple[str, ...]()
        if not isinstance(labels, list):
            raise RowError(row.where, f"column {self.config.label_key!r} is not a list")
        if self.config.steps_key is None:
            ids, places = self.encode_steps(row)
            check_counts(labels, places, "placeholders in the text", row)
        else:
            steps = self.steps(row, self.config.steps_key)
            check_counts(labels, steps, "steps", row)
            kept = [index for index, step in enumerate(steps) if step.strip()]
            notes = (BLANK_STEP,) if len(kept) < len(steps) else ()
            labels = [labels[index] for index in kept]
            ids, places = self.append_steps(self.text(row, generation_prompt=True), [steps[index] for index in kept])
        targets = [self.target(label, row) for label in labels]
        length = min(len(ids), self.config.max_len)
        mask, target, weight = [0] * length, [0.0] * length, [0.0] * length
        for place, label in zip(places, targets, strict=True):
            if place < length:
                mask[place], (target[place], weight[place]) = 1, label
        if not any(mask):
            raise LeftOut(row.where, f"no placeholder within data.max_len={self.config.max_len}")
        numbers = {"target": target, "weight": weight}
        return Example(ids[:length], mask, row.where, truncated=len(ids) > length, token_numbers=numbers, notes=notes)

    def encode_steps(self, row: Row) -> tuple[list[int], list[int]]:
        """Return the ids of a text that contains its placeholders, and the positions of the placeholders."""
        ids = tokens(self.tokenizer, self.text(row, generation_prompt=False), self.begin)
        return ids, [place for place, token in enumerate(ids) if token == self.placeholder]

    def steps(self, row: Row, steps_key: str) -> list[str]:
        """Return the steps of a solution, at least one of which is not blank."""
        steps = require_value(row, steps_key)
        if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
            raise RowError(row.where, f"column {steps_key!r} is not a list of texts")
        if not any(map(str.strip, steps)):
            raise RowError(row.where, f"column {steps_key!r} has no step that is not blank")
        return steps

    def append_steps(self, prompt: str, steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the ids of a rendered prompt followed by the steps, one per line, and the positions of the
        placeholders.

        Each step ends in the placeholder. It is added as an id, so no text in a step can move or imitate it.
        """
        ids, places, before = tokens(self.tokenizer, prompt, self.begin), [], prompt
        for index, step in enumerate(steps):
            begins_a_line = index == 0 and self.config.apply_chat_template
            text = step if begins_a_line else f"\n{step}"
            ids += [*encode_after(self.tokenizer, before, text), self.placeholder]
            places.append(len(ids) - 1)
            before = self.mark
        return ids, places

    def text(self, row: Row, generation_prompt: bool) -> str:
        """Return the text of the prompt column, rendered."""
        if not self.config.apply_chat_template:
            return fill(self.config.input_template, text_of(row, self.config.input_key))
        messages = messages_of(join_columns(row, self.config.input_key), self.config.input_key, "user", row)
        return self.template.text(messages, row, tools_of(row, self.config.tools_key), generation_prompt)

    def target(self, label: object, row: Row) -> tuple[float, float]:
        """Return (target, weight) of a label: the text of a reward token, or the probability of the first of two reward
        tokens."""
        if isinstance(label, str):
            if self.names is None:
                ids = tokens(self.tokenizer, label)
                if len(ids) != 1:
                    raise RowError(row.where, "a label is not one token of this tokenizer")
                return float(ids[0]), 1.0
            if label not in self.names:
                raise RowError(row.where, "a label is not one of algo.reward_tokens")
            return float(self.names.index(label)), 1.0
        if not isinstance(label, int | float) or not 0 <= label <= 1:
            raise RowError(row.where, "a label is neither the text of a token nor a probability")
        if self.names is None or len(self.names) != 2:
            raise RowError(row.where, "labels that are probabilities need two algo.reward_tokens, the good one first")
        return 0.0, float(label)


def check_counts(labels: Sequence[object], places: Sequence[object], unit: str, row: Row) -> None:
    """Raise RowError unless there is one label for each of `places`."""
    if len(labels) != len(places):
        raise RowError(row.where, f"the number of labels is not the number of {unit}")


@dataclass(frozen=True)
class StepFormat:
    """The format that a process reward model was trained on. Its config.json holds it, so that scoring
    needs no flags."""

    placeholder_token: str
    reward_tokens: list[str]  # the token for good steps comes first
    step_separator: str  # between the steps of a solution; empty: every character is a step
    listed: bool  # steps were given as a list (data.steps_key), not as text with placeholders in it
    input_template: str | None
    apply_chat_template: bool
    max_len: int
    chat_template_kwargs: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, data: DataConfig, algo: AlgoConfig) -> StepFormat | None:
        """Return the format of a training run; None if the whole vocabulary was trained, since then no token means
        good."""
        if algo.reward_tokens is None:
            return None
        listed, template = data.steps_key is not None, data.input_template
        separator, chat, variables = data.step_separator, data.apply_chat_template, list(data.chat_template_kwargs)
        tokens = (algo.placeholder_token, list(algo.reward_tokens))
        return cls(*tokens, separator, listed, template, chat, data.max_len, variables)

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> StepFormat:
        """Return the format that `to_json` returned."""
        return cls(**saved)

    def to_json(self) -> dict[str, Any]:
        """Return the format as plain JSON values."""
        return asdict(self)


class SolutionEncoder:
    """Encodes a prompt and a response, without labels, as a sequence whose mask is 1 at the placeholder after each
    step."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: StepFormat, step_separator: str | None = None) -> None:
        """Set up the encoder. `step_separator` separates the steps of responses, if not with the
        separator of training."""
        self.form, self.tokenizer = form, tokenizer
        self.separator = form.step_separator if step_separator is None else step_separator
        data = DataConfig.of(
            "prm",
            input_template=form.input_template,
            apply_chat_template=form.apply_chat_template,
            chat_template_kwargs=form.chat_template_kwargs,
            max_len=form.max_len,
        )
        algo = AlgoConfig.of("prm", placeholder_token=form.placeholder_token, reward_tokens=form.reward_tokens)
        self.encoder = StepEncoder(tokenizer, data, algo)
        assert self.encoder.columns is not None
        self.columns = self.encoder.columns

    def steps(self, response: str) -> list[str]:
        """Return the steps of a response, stripped of white space, without blank ones.

        Placeholders in the response are removed: the model that writes the response must not mark steps of its own.
        """
        text = response.replace(self.form.placeholder_token, "")
        parts = text.split(self.separator) if self.separator else list(text)
        return [part.strip() for part in parts if part.strip()]

    def encode(self, prompt: str, response: str, is_rendered: bool = False) -> Example:
        """Return the solution as it would be in training, after the prompt in its template (unless it `is_rendered`
        already).

        `truncated` says that it was cut at the longest sequence of training, so that some steps lack their placeholder.
        """
        rendered = prompt if is_rendered else self.render(prompt)
        lay_out = self.encoder.append_steps if self.form.listed else self.encode_steps
        ids, places = lay_out(rendered, self.steps(response))
        kept = min(len(ids), self.form.max_len)
        mask = [0] * kept
        for place in places:
            if place < kept:
                mask[place] = 1
        return Example(ids[:kept], mask, truncated=sum(mask) < len(places))

    def render(self, prompt: str) -> str:
        """Return a prompt in the template of training."""
        row = Row({self.encoder.config.input_key: prompt}, "prompt", 1)
        return self.encoder.text(row, generation_prompt=True)

    def encode_steps(self, prompt: str, steps: list[str]) -> tuple[list[int], list[int]]:
        """Return the ids of the prompt and the steps, each followed by its placeholder and the separator, and its
        positions.

        A blank separates prompt and steps if the prompt does not end in white space. Placeholders are added as ids.
        """
        gap = "" if not prompt or prompt[-1].isspace() else " "
        ids, places = tokens(self.tokenizer, f"{prompt}{gap}{steps[0]}" if steps else prompt, self.encoder.begin), []
        for index in range(len(steps)):
            if index > 0:
                ids += encode_after(
                    self.tokenizer, self.form.placeholder_token, self.form.step_separator + steps[index]
                )
            ids.append(self.encoder.placeholder)
            places.append(len(ids) - 1)
        return ids, places
