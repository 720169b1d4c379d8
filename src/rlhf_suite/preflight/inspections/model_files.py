"""Read the files of a model folder without the libraries that load models."""

from __future__ import annotations

import ast
import json
import os
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("tekken.json", "tiktoken.model", "tokenizer.model.v*", "*.tiktoken"),
)
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
SCALED = ("linear", "dynamic", "yarn")  # scalings of rotary positions that max_position_embeddings does not include
INDEX, OLD_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
LINES = re.MULTILINE | re.DOTALL
HEADER_BYTES = 100 << 20  # the largest header of a safetensors file, by its specification


@dataclass(frozen=True)
class ModelFiles:
    """The contents of the files in `folder`, each read when it is first needed."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """Return the contents of config.json, or None if it is missing or not a JSON object."""
        return read_json(self.folder / "config.json")

    def setting(self, name: str) -> Any:
        """Return a value of config.json, or of its section `text_config` for a model that also reads images."""
        config = self.config or {}
        text = config.get("text_config")
        return config.get(name, text.get(name) if isinstance(text, dict) else None)

    @cached_property
    def weight_files(self) -> list[Path]:
        """Return the weight files that an index names, or else those that exist."""
        for index in (INDEX, OLD_INDEX):
            shards = (read_json(self.folder / index) or {}).get("weight_map")
            if isinstance(shards, dict):
                return [self.folder / name for name in sorted(set(shards.values()))]
        return sorted(self.folder.glob("*.safetensors")) or sorted(self.folder.glob("*.bin"))

    @cached_property
    def headers(self) -> dict[Path, dict[str, Any]]:
        """Return the headers of the safetensors files that exist."""
        return {file: header(file) for file in self.weight_files if file.suffix == ".safetensors" and file.is_file()}

    @property
    def tensors(self) -> dict[str, list[int]] | None:
        """Return the shape of each tensor by name, or None if the weights are in another format."""
        if not self.headers:
            return None
        return {name: about["shape"] for header in self.headers.values() for name, about in header.items()}

    def is_whole(self, file: Path) -> bool:
        """Return whether a file is as long as its header says. For other formats return True."""
        if file not in self.headers:
            return True
        ends = [about["data_offsets"][1] for about in self.headers[file].values()]
        return bool(self.headers[file]) and file.stat().st_size >= max(ends)

    @property
    def has_tokenizer(self) -> bool:
        """Return whether the folder has the files of a tokenizer."""
        return any(next(self.folder.glob(name), None) for name in TOKENIZERS)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token, special ones too, by tokenizer.json; empty if there is none."""
        tokenizer = read_json(self.folder / "tokenizer.json") or {}
        known = tokenizer.get("model", {}).get("vocab", {})
        ids = dict(known) if isinstance(known, dict) else {piece[0]: place for place, piece in enumerate(known)}
        return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}

    def has_words_beyond(self, rows: object) -> bool:
        """Return whether a word of the vocabulary, or the token that ends texts, has no place in an embedding of so
        many rows. Other added tokens may have none, as long as no text has them."""
        tokenizer = read_json(self.folder / "tokenizer.json") or {}
        added = {token["content"] for token in tokenizer.get("added_tokens", ())}
        end = (read_json(self.folder / "tokenizer_config.json") or {}).get("eos_token")
        added -= {end.get("content") if isinstance(end, dict) else end}
        return isinstance(rows, int) and any(
            number >= rows for token, number in self.vocabulary.items() if token not in added
        )

    @property
    def has_chat_template(self) -> bool:
        """Return whether the tokenizer has a chat template."""
        names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")
        config = read_json(self.folder / "tokenizer_config.json") or {}
        return bool(config.get("chat_template")) or any((self.folder / name).exists() for name in names)

    @property
    def positions(self) -> int | None:
        """Return the longest sequence that the model supports, in tokens, or None if config.json does not say."""
        numbers = [number for name in POSITIONS if isinstance(number := self.setting(name), int) and number > 0]
        if not numbers:
            return None
        settings = (self.setting(name) for name in ("rope_scaling", "rope_parameters"))
        ropes = [rope for rope in settings if isinstance(rope, dict)]
        ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]  # by type of layer
        return max(numbers[0], *(count_scaled_positions(rope, numbers[0]) for rope in ropes), 0)

    @property
    def head_size(self) -> int | None:
        """Return the dimensions of an attention head, or None if config.json does not say."""
        if self.setting("kv_lora_rank") is not None:  # what such a layer keeps of its heads has a size of its own
            return None
        if isinstance(size := self.setting("head_dim"), int) and size > 0:
            return size
        source = config_class(self.text_type)
        if default := re.search(r"\bhead_dim\b[^=\n]*=\s*(\d+)", source):
            return int(default[1])
        width, heads = (self.either(names) for names in (("hidden_size", "n_embd"), ("num_attention_heads", "n_head")))
        return width // heads if source and width and heads else None

    @property
    def latent_size(self) -> int | None:
        """Return the dimensions that a layer with latent attention keeps of a token, or None for other attention."""
        parts = [self.setting(name) for name in ("kv_lora_rank", "qk_rope_head_dim")]
        return sum(parts) if all(isinstance(part, int) for part in parts) else None

    @property
    def text_type(self) -> str:
        """Return the type of the model, of that part of it that writes text."""
        text = (self.config or {}).get("text_config")
        return str((text if isinstance(text, dict) else self.config or {}).get("model_type", ""))

    def either(self, names: Sequence[str]) -> int | None:
        """Return the first of these settings that is a number."""
        return next((value for name in names if isinstance(value := self.setting(name), int)), None)


@cache
def files_of(folder: Path) -> ModelFiles:
    """Return the files of a folder; they are read once for all jobs of a sweep."""
    return ModelFiles(folder)


def count_scaled_positions(rope: dict[str, Any], positions: int) -> int:
    """Return the number of positions under a scaling of the rotary embedding."""
    if rope.get("rope_type", rope.get("type")) not in SCALED:
        return positions
    return int(float(rope.get("factor") or 1.0) * int(rope.get("original_max_position_embeddings") or positions))


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file has none."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def header(file: Path) -> dict[str, Any]:
    """Return the tensors that the header of a safetensors file lists, or nothing if the header cannot be read.

    The file begins with the length of the header in 8 bytes, then comes the header as JSON.
    """
    with file.open("rb") as content:
        start = content.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        text = content.read(length) if length <= HEADER_BYTES else b""
    try:
        tensors = json.loads(text)
    except ValueError:
        return {}
    return {name: about for name, about in tensors.items() if name != "__metadata__"}


@cache
def read_model_types() -> str:
    """Return the source code of the tables of model types in transformers, which has each type in quotes."""
    return "".join(
        file.read_text(encoding="utf-8") for file in (package("transformers") / "models" / "auto").glob("*.py")
    )


@cache
def config_class(model_type: str) -> str:
    """Return the source code of the settings of a type of model in transformers; empty if it is not found."""
    parts = model_type.replace("-", "_").split("_")
    for count in range(len(parts), 0, -1):
        name = "_".join(parts[:count])
        with suppress(OSError):
            source = (package("transformers") / "models" / name / f"configuration_{name}.py").read_text(
                encoding="utf-8"
            )
            if match := re.search(rf'^    model_type = "{re.escape(model_type)}"$(.*?)(?=^class |\Z)', source, LINES):
                return match[1]
    return ""


@cache
def head_sizes_on_cpu(latent: bool = False) -> tuple[int, ...]:
    """Return the sizes of attention heads for which vLLM has CPU kernels, or those of latent attention, read from its
    source; none if it does not say them as a list."""
    try:
        backends = package("vllm") / "v1" / "attention" / "backends"
        source = (backends / "mla" / "cpu_mla.py" if latent else backends / "cpu_attn.py").read_text(encoding="utf-8")
    except OSError:
        return ()
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    named = (definition for definition in functions if definition.name == "get_supported_head_sizes")
    returned = (
        statement.value for function in named for statement in function.body if isinstance(statement, ast.Return)
    )
    with suppress(ValueError, TypeError):
        return tuple(ast.literal_eval(next((value for value in returned if value is not None), "()")))
    return ()


def package(name: str) -> Path:
    """Return the folder of an installed package, found without importing it."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else Path(os.devnull)
