"""Answers of a language model, streamed as they are written; what it has read already is not read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, DynamicCache, GenerationConfig, PreTrainedTokenizerBase, TextStreamer
from transformers.cache_utils import DynamicLayer

from rlhf_suite.config.chat import ChatConfig, ChatTextConfig
from rlhf_suite.config.ds import ForwardConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.load import load_model, load_tokenizer, loading, model_folder

FLAG = "actor.model_name_or_path"


@dataclass(frozen=True)
class ChatResponse:
    """What the model wrote, and whether it ended there of its own accord, at the cap, or was interrupted."""

    text: str
    num_tokens: int
    is_capped: bool = False
    is_interrupted: bool = False


class ChatModel:
    """A model on one device, its precision that of its file. Keys and values of the last prompt and answer are kept,
    and serve the next prompt as far as its tokens are the same."""

    def __init__(self, path: str, config: ChatConfig, text: ChatTextConfig, device: str) -> None:
        self.tokenizer = load_tokenizer(path, text, FLAG)
        with loading(FLAG, path):
            own = AutoConfig.from_pretrained(model_folder(path, FLAG), trust_remote_code=False)
        limit = getattr(own.get_text_config(), "max_position_embeddings", None)
        if limit is not None and config.max_len > limit:
            raise UserError(
                f"chat.max_len={config.max_len}: {FLAG}={path} was made for {limit} tokens. Write chat.max_len={limit} "
                "or less"
            )
        ds = ForwardConfig(
            param_dtype="fp32" if own.dtype in (None, torch.float32) else "bf16", attn_implementation="sdpa"
        )
        self.model = load_model(path, head="lm", ds=ds, flag=FLAG).model.to(device).requires_grad_(False)
        # In place of the model's own, whose sampling settings would fill in for those that are not given.
        self.model.generation_config = generation(config, self.tokenizer, self.model.generation_config)
        self.device = device
        self.ids: list[int] = []
        self.cache: DynamicCache | None = None

    @torch.inference_mode()
    def respond(self, ids: list[int], on_text: Callable[[str], None]) -> ChatResponse:
        """The answer to a prompt; `on_text` gets it piece by piece. Ctrl-C ends the answer, not the program."""
        cache = self._known(ids)
        self.ids, self.cache = [], None  # an interrupted forward leaves layers of different lengths
        stream = Stream(self.tokenizer, on_text)
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

    def _known(self, ids: Sequence[int]) -> DynamicCache | None:
        """The cache, cut to the tokens that begin `ids`; its last token is always read, for what comes after it."""
        same = 0
        for old, new in zip(self.ids, ids[:-1], strict=False):
            if old != new:
                break
            same += 1
        if self.cache is None or same == 0:
            return None
        if same < len(self.ids):
            self.cache.crop(same - len(self.ids))  # negative: so many tokens less
        return self.cache

    def _keep(self, cache: DynamicCache, ids: list[int]) -> None:
        """Remember what was read, if it can be cut anywhere: sliding windows and recurrent states cannot."""
        if all(type(layer) is DynamicLayer for layer in cache.layers):
            self.cache, self.ids = cache, ids[: cache.get_seq_length()]


def generation(config: ChatConfig, tokenizer: PreTrainedTokenizerBase, own: GenerationConfig) -> GenerationConfig:
    """How to sample. An answer ends with the tokenizer's end of sequence or one of those that the model names."""
    named = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    ends = {int(token) for token in (tokenizer.eos_token_id, *named) if token is not None}
    sampling = {"temperature": config.temperature, "top_p": config.top_p, "top_k": max(config.top_k, 0)}
    return GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        do_sample=config.temperature > 0,
        eos_token_id=sorted(ends),
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        **(sampling if config.temperature > 0 else {}),
    )


class Stream(TextStreamer):
    """Collects an answer's ids and hands its text on, in pieces that later tokens do not change."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt [1, T], then one token [1] at a time."""
        if not self.next_tokens_are_prompt:
            self.ids += value.tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with text that is final, at the end perhaps with none."""
        if text:
            self.on_text(text)
