"""A real tokenizer, trained in milliseconds: byte-level BPE, distinct pad, begin and end tokens, a ChatML template."""

from __future__ import annotations

from importlib import import_module

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "the user asks the assistant and the assistant answers the user",
    "User: hello there\nAssistant: hello user, how are you today?\n\n",
    "reverse sort add = 0 1 2 3 4 5 6 7 8 9 what is the capital of France? Paris.",
] * 20


def make_tokenizer(add_bos: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if add_bos:
        begin = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
    )


@pytest.fixture(scope="session")
def trained_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def tokenizer(trained_tokenizer):
    """The same tokenizer for every test, with its own template back in place."""
    trained_tokenizer.chat_template = CHATML
    return trained_tokenizer


@pytest.fixture(scope="session")
def bos_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(add_bos=True)


@pytest.fixture
def datasets():
    """The library; its import takes long, also where this file's tests do not run."""
    return import_module("datasets")
