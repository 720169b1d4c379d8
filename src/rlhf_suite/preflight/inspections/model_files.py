"""Read the files of a model folder without the libraries that load models."""

from __future__ import annotations

import json
import struct
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
        return {name: about["shape"] for each in self.headers.values() for name, about in each.items()}

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

    @property
    def has_chat_template(self) -> bool:
        """Return whether the tokenizer has a chat template."""
        names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")
        config = read_json(self.folder / "tokenizer_config.json") or {}
        return bool(config.get("chat_template")) or any((self.folder / name).exists() for name in names)

    @property
    def positions(self) -> int | None:
        """Return the longest sequence that the model supports, in tokens, or None if config.json does not say."""
        found = [number for name in POSITIONS if isinstance(number := self.setting(name), int) and number > 0]
        if not found:
            return None
        ropes = [each for name in ("rope_scaling", "rope_parameters") if isinstance(each := self.setting(name), dict)]
        ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]  # by type of layer
        return max(found[0], *(scaled_positions(rope, found[0]) for rope in ropes), 0)


@cache
def files_of(folder: Path) -> ModelFiles:
    """Return the files of a folder; they are read once for all jobs of a sweep."""
    return ModelFiles(folder)


def scaled_positions(rope: dict[str, Any], positions: int) -> int:
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
def known_model_types() -> str:
    """Return the source code of the tables of model types in transformers, which has each type in quotes."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    auto = Path(spec.origin).parent / "models" / "auto"
    return "".join(file.read_text() for file in auto.glob("*.py"))
