"""A frozen chat model that judges, on engines of the run. It is loaded once; weight syncs and sleep are those of the
rollout engines alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from zlib import crc32

import numpy as np

from rlhf_suite.config.declarations.reward import JudgeConfig
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings, sample_seed
from rlhf_suite.data.template import UNRENDERED
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.errors import UserError
from rlhf_suite.models.judge import JUDGE_FLAG
from rlhf_suite.models.load import Tokenizer
from rlhf_suite.rewards.judge_model import CUT_OFF, Ask, Messages, Reply
from rlhf_suite.rewards.rubric import NoVerdict
from rlhf_suite.rewards.yes_no import WORDS, share_of_yes

TEMPLATE = "chat_template_kwargs"  # a field of reward.judge.body; the others are of `SamplingSettings`
QUEUED = 256  # questions that an engine has at a time


class JudgeEngines:
    """A chat model on engines. `max_len`: the longest question with its reply in tokens."""

    def __init__(
        self,
        engines: EnginePool,
        tokenizer: Tokenizer,
        config: JudgeConfig,
        stop_ids: tuple[int, ...],
        *,
        max_len: int,
        seed: int,
    ) -> None:
        self.engines, self.tokenizer, self.config = engines, tokenizer, config
        self.max_len, self.seed = max_len, seed
        self.about: Mapping[str, Any] = {"model": config.model, "body": config.body, "engines": True}
        self.concurrency = QUEUED * len(engines)
        sampling = {name: value for name, value in config.body.items() if name != TEMPLATE and value is not None}
        self.words = first_tokens(tokenizer, config) if config.mode == "yes_no" else ()
        if self.words:
            self.sampling, self.longest = SamplingSettings(temperature=0.0, only=self.words), 1
        else:
            settings = {"temperature": 0.0, **sampling}
            self.sampling = SamplingSettings(**settings, stop_token_ids=stop_ids, log_probs=False)
            self.longest = config.max_new_tokens
        self.template = dict(config.body.get(TEMPLATE) or {})
        self.has_system = self.check_template()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        """Give access to the engines, which are there for the whole run."""
        yield self.ask

    async def ask(self, messages: Messages, begin: Callable[[], None]) -> Reply:
        """Return the reply of an engine."""
        ids = self.encode(messages)
        if (room := self.max_len - len(ids)) < 1:
            problem = f"the question has {len(ids)} tokens, too many for reward.judge.max_len={self.max_len}"
            raise NoVerdict(problem)
        begin()
        seed = sample_seed(self.seed, crc32(np.asarray(ids, np.int64).tobytes()))
        request = GenerationRequest(0, ids, min(room, self.longest), seed, self.sampling)
        generation = await asyncio.wrap_future(self.engines.submit(request))
        return self.read(generation, len(ids))

    def read(self, generation: Generation, asked: int) -> Reply:
        """Return what an engine wrote as a reply to a question of so many tokens."""
        tokens, text = asked + len(generation.ids), self.tokenizer.decode(generation.ids, skip_special_tokens=True)
        if not self.words:
            return Reply(text, tokens, CUT_OFF if generation.finish_reason == "length" else "")
        (token,), (log_prob,) = generation.ids.tolist(), generation.log_probs.tolist()
        likely = math.exp(min(log_prob, 0.0))
        yes, no = (likely, 1 - likely) if token == self.words[0] else (1 - likely, likely)
        return Reply(text, tokens, probability=share_of_yes(yes, no))

    def encode(self, messages: Messages) -> list[int]:
        """Return the tokens of a conversation, with the beginning of the reply."""
        given = [dict(message) for message in messages]
        if not self.has_system:
            given = [{"role": "user", "content": "\n\n".join(message["content"] for message in given)}]
        text = self.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True, **self.template)
        return self.tokenizer.encode(str(text), add_special_tokens=False)

    def check_template(self) -> bool:
        """Return whether the chat template takes a message of the system, which else stands before that of the user.

        Raises:
            UserError: the tokenizer has none.
        """
        if self.tokenizer.chat_template is None:
            problem = "its tokenizer has no chat template, so it cannot be asked"
            raise UserError(f"{JUDGE_FLAG}={self.config.model}: {problem}. Give a chat model")
        messages = [{"role": role, "content": "x"} for role in ("system", "user")]
        try:
            self.tokenizer.apply_chat_template(messages, tokenize=False, **self.template)
        except UNRENDERED:
            return False
        return True


def first_tokens(tokenizer: Tokenizer, config: JudgeConfig) -> tuple[int, ...]:
    """Return the first tokens of Yes and No.

    Raises:
        UserError: they are the same.
    """
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in WORDS)
    if yes == no:
        raise UserError(
            f"{JUDGE_FLAG}={config.model}: its tokenizer begins Yes and No with the same token. Write mode=verdict"
        )
    return yes, no
