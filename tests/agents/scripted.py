"""A tokenizer whose tokens merge, and policies that write what a test says, in the tokens that a test chooses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from clock import HOURS_S
from given import prompt
from rlhf_suite.agents.base import Task
from rlhf_suite.agents.bridge import Bridge
from rlhf_suite.agents.parsing import TurnReader
from rlhf_suite.agents.session import Limits, Session, Shared
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.trajectory import Trajectory

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}\n<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    'the user asks the assistant, the tool answers "value": 12 34\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}',
    "wrong, try again: too high or too low?\n\n```python\nprint(1)\n```\n```output\n1\n```\n",
] * 20
STOP = "<|im_end|>"


def make_tokenizer(special: Iterable[str] = (), template: str = CHATML) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with merges; ` special` tokens are never split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = list(dict.fromkeys(["<pad>", "<|im_start|>", STOP, *special]))
    trainer = trainers.BpeTrainer(
        vocab_size=420 + len(names),
        special_tokens=names,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=STOP,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def pieces(tokenizer: PreTrainedTokenizerFast, text: str, draw: random.Random) -> list[int]:
    """Return ids that decode to `text`, but are not those of the tokenizer: cut at random places first."""
    if not text:
        return []
    cuts = sorted({0, len(text), *(draw.randrange(len(text)) for _ in range(3))})
    parts = [text[a:b] for a, b in pairwise(cuts)]
    return [i for part in parts for i in tokenizer(part, add_special_tokens=False)["input_ids"]]


class Scripted:
    """Writes the replies of a script, each a text, or (text, finish reason); without an end it is stopped by its end.

    The texts come in tokens that their re-encoding would not give. Every request is kept.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, replies: Iterable[str | tuple[str, str]], seed: int = 0):
        self.tokenizer, self.replies, self.draw = tokenizer, iter(replies), random.Random(seed)
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        await asyncio.sleep(0)
        reply = next(self.replies)
        text, finish = reply if isinstance(reply, tuple) else (reply, "stop")
        ids = pieces(self.tokenizer, text, self.draw)
        if finish == "stop" and not any(text.endswith(each) for each in request.sampling.stop):
            ids.append(request.sampling.stop_token_ids[0])
        ids = ids[: request.max_new_tokens]
        log_probs = np.array([-self.draw.random() for _ in ids], np.float32)
        return Generation(request.id, np.array(ids, np.int32), log_probs, finish, np.full(len(ids), 7, np.int32))


def open_session(
    tokenizer: PreTrainedTokenizerFast,
    policy: object,
    task: Task,
    stop_ids: Sequence[int] = (),
    parser: str | None = None,
    **limits: int,
) -> Session:
    """Return a session of one sample of a task."""
    stops = tuple(stop_ids) or (tokenizer.eos_token_id,)
    shared = Shared(
        policy,
        Bridge(tokenizer, DataConfig.of("sft", apply_chat_template=True), stops),
        TurnReader(tokenizer, stops, parser),
        Limits(**({"max_len": 4000} | limits)),
    )
    ledger = Trajectory.start(prompt(3, task.ids), 1, 2)
    return Session(shared, task, ledger, (5, 0, 8, 3, 2), SamplingSettings(stop_token_ids=stops))


def chat_task(tokenizer: PreTrainedTokenizerFast, text: str = "begin", tools: Sequence[dict] = (), **others) -> Task:
    """Return a task of one message of the user."""
    messages = ({"role": "user", "content": text},)
    rendered = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return Task(ids, rendered, messages, tuple(tools), **others)


def ends_of_turns(ledger: Trajectory) -> list[int]:
    """Return how many tokens a ledger has up to the end of each turn of the model."""
    later = np.append(ledger.model_mask[1:], False)
    return (np.flatnonzero(ledger.model_mask & ~later) + 1).tolist()


def run(function: Callable, *arguments):
    """Run a coroutine function to its end, with a deadline."""
    return asyncio.run(asyncio.wait_for(function(*arguments), HOURS_S))
