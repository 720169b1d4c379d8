"""Solutions without marks, for a trained process reward model: cut into steps and laid out as it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_suite.config.algo_supervised import PRMAlgoConfig
from rlhf_suite.config.data import StepDataConfig
from rlhf_suite.data.batch import Example
from rlhf_suite.data.render import tokens
from rlhf_suite.data.row import Row
from rlhf_suite.data.steps import StepEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StepFormat:
    """What a process reward model was trained on; kept in its config.json, so that scoring needs no flags."""

    placeholder_token: str
    reward_tokens: list[str]  # the good one first
    step_separator: str  # between the steps of a solution; empty: every character is a step
    listed: bool  # steps came as a list (data.steps_key), not as text with placeholders in it
    input_template: str | None
    apply_chat_template: bool
    max_len: int
    chat_template_kwargs: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, data: StepDataConfig, algo: PRMAlgoConfig) -> StepFormat | None:
        """Of a training run; None where the whole vocabulary was trained, which has no token that means good."""
        if algo.reward_tokens is None:
            return None
        listed, template = data.steps_key is not None, data.input_template
        separator, chat, variables = data.step_separator, data.apply_chat_template, list(data.chat_template_kwargs)
        tokens = (algo.placeholder_token, list(algo.reward_tokens))
        return cls(*tokens, separator, listed, template, chat, data.max_len, variables)

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> StepFormat:
        return cls(**saved)

    def saved(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


class SolutionEncoder:
    """A prompt and a response to a sequence whose mask is 1 at the placeholder behind each step."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: StepFormat, step_separator: str | None = None) -> None:
        """`step_separator`: of the responses, where it is another one than in training."""
        self.form, self.tokenizer = form, tokenizer
        self.separator = form.step_separator if step_separator is None else step_separator
        data = StepDataConfig(
            input_template=form.input_template,
            apply_chat_template=form.apply_chat_template,
            chat_template_kwargs=form.chat_template_kwargs,
            max_len=form.max_len,
        )
        algo = PRMAlgoConfig(placeholder_token=form.placeholder_token, reward_tokens=form.reward_tokens)
        self.encoder = StepEncoder(tokenizer, data, algo)
        assert self.encoder.columns is not None
        self.columns = self.encoder.columns

    def steps(self, response: str) -> list[str]:
        """The steps of a response, without blank ones and without white space around them. A placeholder that the
        response holds is taken out: what writes it may not mark steps of its own."""
        text = response.replace(self.form.placeholder_token, "")
        parts = text.split(self.separator) if self.separator else list(text)
        return [part.strip() for part in parts if part.strip()]

    def encode(self, prompt: str, response: str, is_rendered: bool = False) -> Example:
        """As in training: behind a prompt in its template, unless it `is_rendered` already. `truncated`: cut at
        the longest sequence of training, so that not every step has its placeholder."""
        row = Row({self.encoder.config.input_key: prompt}, "prompt", 1)
        rendered = prompt if is_rendered else self.encoder.text(row, generation_prompt=True)
        lay_out = self.encoder.behind if self.form.listed else self.marked
        ids, places = lay_out(rendered, self.steps(response))
        kept = min(len(ids), self.form.max_len)
        mask = [0] * kept
        for place in places:
            if place < kept:
                mask[place] = 1
        return Example(ids[:kept], mask, truncated=sum(mask) < len(places))

    def marked(self, prompt: str, steps: list[str]) -> tuple[list[int], list[int]]:
        """Text with a placeholder directly behind every step, then the separator; a blank between prompt and steps
        where the prompt ends without white space. The placeholders are put there as ids."""
        gap = "" if not prompt or prompt[-1].isspace() else " "
        ids, places = tokens(self.tokenizer, f"{prompt}{gap}{steps[0]}" if steps else prompt, self.encoder.begin), []
        for index in range(len(steps)):
            if index > 0:
                ids += tokens(self.tokenizer, f"{self.form.step_separator}{steps[index]}")
            ids.append(self.encoder.placeholder)
            places.append(len(ids) - 1)
        return ids, places
