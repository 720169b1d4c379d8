"""Models that need no download: a byte tokenizer and random weights, written as a Hugging Face folder.

`builtin:tiny` is a Qwen3 of 0.16 million parameters that learns character tasks on one CPU core in seconds.
`builtin:small`, of 12 million, is meant for measurements. `builtin:hybrid` is an LFM2 of 0.2 million with convolutions
in two of its four layers. `builtin:vision` is an Idefics3 of 0.3 million that reads one image of 56 x 56 pixels as four
tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from rlhf_suite.disk import cache_folder, write_aside
from rlhf_suite.errors import UserError
from rlhf_suite.models.weights import write_weights

PREFIX = "builtin:"
TIED = "lm_head.weight"  # in a tied model the same tensor as the embedding
PAD, BOS, EOS, START = "<|pad|>", "<|begin|>", "<|im_end|>", "<|im_start|>"
ROLES = ("system", "user", "assistant", "tool")  # one token each, so that the template needs few tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
IMAGE, IMAGE_TOKENS = "<image>", ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IMAGE_TEMPLATE = CHAT_TEMPLATE.replace(
    "message['content'] + '<|im_end|>'",
    "(message['content'] if message['content'] is string else parts.text) + '<|im_end|>'",
).replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% set parts = namespace(text='') %}"
    "{% if message['content'] is not string %}{% for item in message['content'] %}"
    "{% set parts.text = parts.text + ('<image>' if item['type'] == 'image' else item['text']) %}"
    "{% endfor %}{% endif %}",
)
IMAGE_SIZE, PATCH_SIZE, SCALE_FACTOR = 56, 14, 2  # pixels, pixels, patches a side in a token


@dataclass(frozen=True)
class Shape:
    """The architecture and size of a built-in model."""

    family: str = "qwen3"  # a name in FAMILIES
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 0  # 0: the size of the tokenizer
    tied: bool = True
    max_length: int = 4096


# For each family: configuration class, model class, arguments that only this family has.
FAMILIES: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, {"block_multiple_of": 64}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
SHAPES = {
    "tiny": Shape(),
    "small": Shape(hidden=256, layers=12, heads=8, kv_heads=4, vocabulary=2048),
    "hybrid": Shape(family="lfm2", layers=4, heads=2, kv_heads=1),
    "vision": Shape(family="idefics3", tied=False),
}


def builtin_folder(name: str, flag: str) -> Path:
    """Return the folder of `builtin:<name>` in the user's cache, and write it the first time. It is equal on every
    machine."""
    shape = SHAPES.get(name.removeprefix(PREFIX))
    if shape is None:
        raise UserError(
            f"{flag}={name}: there is no such model. Write {' or '.join(PREFIX + known for known in SHAPES)}"
        )
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache_folder("builtin") / f"{name.removeprefix(PREFIX)}-{version}"
    if not folder.exists():
        create(folder, shape)
    return folder


def create_tiny(path: Path, seed: int = 0) -> None:
    """Write `builtin:tiny` to a folder."""
    create(path, SHAPES["tiny"], seed)


def create(path: Path, shape: Shape, seed: int = 0, words: Sequence[str] = ()) -> None:
    """Write a model folder with random weights. Equal seeds give equal weights. Each of `words` is one token."""
    sees = shape.family == "idefics3"
    tokenizer = byte_tokenizer(sees)
    tokenizer.add_tokens(list(words))
    config, model_class = vision_config(shape, tokenizer) if sees else text_config(shape, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    # Set only now: transformers zeroes the embedding of the padding token, and the gradient of a norm of zeros explodes
    # if a policy happens to sample that token.
    config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    config.architectures, config.dtype = [model_class.__name__], torch.float32
    weights = {name: tensor for name, tensor in model.state_dict().items() if not (shape.tied and name == TIED)}
    with write_aside(path, keep=True) as folder:
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        if sees:
            save_processor(folder)
        tokenizer.save_pretrained(folder)
        write_weights({n: t.contiguous() for n, t in revert_weight_conversion(model, weights).items()}, folder)


def text_config(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    """Return the configuration of a language model, and its class."""
    config_class, model_class, extra = FAMILIES[shape.family]
    settings: dict[str, Any] = {**sizes(shape, tokenizer), **extra}
    if shape.family == "lfm2":
        settings["layer_types"] = [("conv", "full_attention")[layer % 2] for layer in range(shape.layers)]
        settings |= dict.fromkeys(("conv_dim", "block_dim"), shape.hidden)  # the names under which vLLM reads it
    return config_class(**settings), model_class


def vision_config(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    """Return the configuration of a model that reads images, and its class."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    vision = {
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "initializer_range": 0.5 / shape.hidden**0.5,
    }
    text = {"model_type": "llama", **sizes(shape, tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=SCALE_FACTOR,
        tie_word_embeddings=shape.tied,
        vision_config=vision,
        text_config=text,
    )
    return config, Idefics3ForConditionalGeneration


def save_processor(folder: Path) -> None:
    """Write what makes tokens and pixels of images. It changes the tokenizer that it is given."""
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    size = {"longest_edge": IMAGE_SIZE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    tokens = (IMAGE_SIZE // PATCH_SIZE // SCALE_FACTOR) ** 2
    processor = Idefics3Processor(images, byte_tokenizer(with_images=True), tokens, chat_template=IMAGE_TEMPLATE)
    processor.save_pretrained(folder)


def byte_tokenizer(with_images: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per UTF-8 byte, so that it encodes any text, plus special tokens and role
    names."""
    more = [IMAGE, *IMAGE_TOKENS] if with_images else []
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, BOS, EOS, START])
    backend.add_tokens(list(ROLES))
    backend.add_special_tokens(more)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[START, *more],
        chat_template=IMAGE_TEMPLATE if with_images else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def sizes(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return a shape under the names of transformers' configurations."""
    return {
        "vocab_size": shape.vocabulary or len(tokenizer),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": max(32, shape.hidden // shape.heads),  # the smallest size of vLLM's attention kernels for CPUs
        "intermediate_size": 4 * shape.hidden,
        "initializer_range": 0.5 / shape.hidden**0.5,  # a narrow model learns nothing for long with the usual 0.02
        "max_position_embeddings": shape.max_length,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
