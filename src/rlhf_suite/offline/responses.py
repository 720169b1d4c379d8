"""Responses of a file as rewards see those of a rollout: the text and the tokens that the model read and wrote.

The rule of rollouts: special tokens are part of it, so an end-of-sequence token stands after a response that the model
finished, and none after a response that the length limit cut off. A row that `task=generate` wrote has that whole text
in a column of its own (`data.query_key`). For other rows the text is put together: the prompt, the response, and what
ends it if the row does not say that it was cut off (`data.finish_key`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.batch import Example
from rlhf_suite.data.render import encode_after, tokens
from rlhf_suite.data.row import Row, RowError, join_columns
from rlhf_suite.data.text_encoders import ConversationEncoder, PromptEncoder, cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_FLAGS = (
    *("apply_chat_template", "tokenizer_chat_template", "chat_template_kwargs", "tools_key"),
    *("max_len", "on_bad_row", "input_key", "input_template"),
)
CUT_OFF = ("length", "max_tokens")  # what engines and servers call the end of a response that reached the limit


def is_finished(row: Row, data: DataConfig) -> bool:
    """Return whether the response ended by itself, by column `data.finish_key`; a row without that column is finished.

    Raises:
        RowError: the column holds neither text nor true or false.
    """
    value = row.values.get(data.finish_key) if data.finish_key else None
    if value is None or isinstance(value, bool):
        return value is not False
    if not isinstance(value, str):
        problem = f"column {data.finish_key!r} is of type {type(value).__name__}"
        raise RowError(row.where, f"{problem}; it must be text ({' or '.join(CUT_OFF)}: cut off) or true or false")
    return value not in CUT_OFF


def whole_text(row: Row, data: DataConfig) -> str | None:
    """Return the text of prompt and response with special tokens, if the row has it in column `data.query_key`."""
    value = row.values.get(data.query_key) if data.query_key else None
    return value if isinstance(value, str) else None


def reward_query(row: Row, data: DataConfig, prompt: str, response: str) -> str:
    """Return what rewards that read text are asked about the row's own response."""
    text = whole_text(row, data)
    return prompt + response + (data.response_end if is_finished(row, data) else "") if text is None else text


def has_open_end(row: Row, data: DataConfig) -> bool:
    """Return whether a finished response looks cut off in `reward_query`: nothing says what its model ends with."""
    return not data.response_end and whole_text(row, data) is None and is_finished(row, data)


class ResponseEncoder:
    """Rows to the sequences that a reward model reads, encoded as it was trained and as rollouts are scored."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self.tokenizer, self.data = tokenizer, data
        self.trained = ConversationEncoder(tokenizer, build_sft_config(data))
        self.prompts = PromptEncoder(tokenizer, prompt_config(data))
        # Where a template is asked for, the row is rendered with it, even if it holds a text that was rendered before.
        self.renders = data.apply_chat_template or data.input_template is not None

    def encode(self, row: Row) -> Example:
        """Return the tokens of a row, cut at `data.max_len`; RowError says why it cannot be scored."""
        text = None if self.renders else whole_text(row, self.data)
        if text is not None:  # the begin-of-sequence token is in the text if the model saw one
            return self._example(tokens(self.tokenizer, text), row)
        response = response_text(row, self.data)
        finished = is_finished(row, self.data)
        if finished and response.strip():
            return self.trained.encode_last_response(row)
        prompt = self.prompts.encode(row)
        ids = [*prompt.ids, *encode_after(self.tokenizer, prompt.text, response)]
        if finished and ids[-1] != self.tokenizer.eos_token_id:
            ids.append(self.tokenizer.eos_token_id)
        return self._example(ids, row)

    def _example(self, ids: list[int], row: Row) -> Example:
        if not ids:
            raise RowError(row.where, "prompt and response have no tokens")
        return cut(Example(ids, [0] * len(ids), row.where), self.data.max_len)


def response_text(row: Row, data: DataConfig) -> str:
    """Return the text of the response, which may be empty; of a list of messages, the content of the last one."""
    value = join_columns(row, data.column("output_key"))
    if isinstance(value, list) and data.apply_chat_template and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise RowError(row.where, f"column {data.output_key!r} is of type {type(value).__name__}, not text")
    return value


def build_sft_config(data: DataConfig) -> DataConfig:
    """Return the configuration of supervised tuning that encodes the response as the answer to the prompt."""
    return DataConfig.of("sft", **text_flags(data), output_key=data.output_key)


def prompt_config(data: DataConfig) -> DataConfig:
    """Return the configuration that encodes the prompt as rollouts begin with it."""
    return DataConfig.of("generate", **text_flags(data))


def text_flags(data: DataConfig) -> dict[str, Any]:
    """Return the values of the flags that say how a row becomes text, and text tokens."""
    return {name: getattr(data, name) for name in TEXT_FLAGS}
