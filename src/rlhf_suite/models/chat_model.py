"""A language model for interactive chat: responses are streamed, and tokens that it has read are not read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase, TextStreamer
from transformers.cache_utils import DynamicLayer

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import load_settings
from rlhf_suite.config.declarations.tools import LONGEST, ChatConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.load import load_model, load_tokenizer, read_config

FLAG = "actor.model_name_or_path"


@dataclass(frozen=True)
class ChatResponse:
    """The text that the model wrote, and whether the token limit or the user ended it before its end of sequence."""

    text: str
    num_tokens: int
    is_capped: bool = False
    is_interrupted: bool = False


class ChatModel:
    """A language model on one device, in the precision of its checkpoint.

    The keys and values of the last prompt and response are kept. They serve the next prompt as far as its tokens are
    equal.
    """

    def __init__(
        self, path: str, config: ChatConfig, text: DataConfig, device: str, *, load_in_4bit: bool = False
    ) -> None:
        self.tokenizer = load_tokenizer(path, text, FLAG)
        own = read_config(path, FLAG)
        limit = getattr(own.get_text_config(), "max_position_embeddings", None)
        if limit is not None and config.max_len is not None and config.max_len > limit:
            raise UserError(
                f"chat.max_len={config.max_len}: {FLAG}={path} was made for {limit} tokens. Write chat.max_len={limit} "
                "or less"
            )
        self.max_len = config.max_len or min(LONGEST, limit or LONGEST)
        precision = "fp32" if own.dtype in (None, torch.float32) else "bf16"
        ds = load_settings(param_dtype=precision, attn_implementation="sdpa", load_in_4bit=load_in_4bit)
        self.model = load_model(path, head="lm", ds=ds, flag=FLAG).model.to(device).requires_grad_(False)
        # This replaces the model's own settings, which would otherwise fill in the values that are not given here.
        self.model.generation_config = generation(config, self.tokenizer, self.model.generation_config)
        self.device = device
        self.ids: list[int] = []
        self.cache: DynamicCache | None = None

    @torch.inference_mode()
    def respond(self, ids: list[int], on_text: Callable[[str], None]) -> ChatResponse:
        """Return the response to a prompt and pass its text to `on_text` in pieces. Ctrl-C ends the response, not the
        program."""
        cache = self._cut_cache(ids)
        self.ids, self.cache = [], None  # an interrupted forward pass leaves layers of different lengths in the cache
        stream = ResponseStreamer(self.tokenizer, on_text)
        prompt = torch.tensor([ids], device=self.device)  # [1, T]
        is_interrupted = False
        try:
            out = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, streamer=stream
            )
        except KeyboardInterrupt:
            is_interrupted = True
            stream.end()
        else:
            self._keep(out.past_key_values, [*ids, *stream.ids])
        text = self.tokenizer.decode(stream.ids, skip_special_tokens=True)
        is_capped = not is_interrupted and stream.ids[-1] not in self.model.generation_config.eos_token_id
        return ChatResponse(str(text), len(stream.ids), is_capped, is_interrupted)

    def _cut_cache(self, ids: Sequence[int]) -> DynamicCache | None:
        """Return the cache cut to the tokens with which `ids` begins.

        The last token of `ids` is never in it: the model must read it to predict the next one.
        """
        same = 0
        for old, new in zip(self.ids, ids[:-1], strict=False):
            if old != new:
                break
            same += 1
        if self.cache is None or same == 0:
            return None
        if same < len(self.ids):
            self.cache.crop(same - len(self.ids))  # a negative argument removes so many tokens
        return self.cache

    def _keep(self, cache: DynamicCache, ids: list[int]) -> None:
        """Keep the cache if it can be cut at any token; caches of sliding windows and recurrent states cannot."""
        if all(type(layer) is DynamicLayer for layer in cache.layers):
            self.cache, self.ids = cache, ids[: cache.get_seq_length()]


def generation(config: ChatConfig, tokenizer: PreTrainedTokenizerBase, own: GenerationConfig) -> GenerationConfig:
    """Return the sampling settings. A response ends with the tokenizer's end of sequence, or with one that the model
    names."""
    named = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    ends = {int(token) for token in (tokenizer.eos_token_id, *named) if token is not None}
    sampling = {"temperature": config.temperature, "top_p": config.top_p, "top_k": max(config.top_k, 0)}
    return GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        do_sample=config.temperature > 0,
        eos_token_id=sorted(ends),
        pad_token_id=tokenizer.pad_token_id,
        repetition_penalty=config.repetition_penalty,
        return_dict_in_generate=True,
        **(sampling if config.temperature > 0 else {}),
    )


class ResponseStreamer(TextStreamer):
    """Collects the ids of a response and passes on its text, in pieces that later tokens do not change."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt [1, T] first, then one token [1] at a time."""
        if not self.next_tokens_are_prompt:
            self.ids += value.tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Receive text that is final; at the end of the stream it may be empty."""
        if text:
            self.on_text(text)
