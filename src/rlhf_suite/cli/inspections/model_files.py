"""The files of a model folder, read without the libraries that load them."""

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
STRETCHED = ("linear", "dynamic", "yarn")  # scalings of rotary positions that max_position_embeddings does not count
INDEX, OLD_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
HEADER_BYTES = 100 << 20  # of a safetensors file at most, by its specification


@dataclass(frozen=True)
class ModelFiles:
    """What the files of `folder` say."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """config.json; None if there is none that is a JSON object."""
        return read_json(self.folder / "config.json")

    def setting(self, name: str) -> Any:
        """A value of config.json, or of the part about text of a model that reads images too."""
        config = self.config or {}
        text = config.get("text_config")
        return config.get(name, text.get(name) if isinstance(text, dict) else None)

    @cached_property
    def weight_files(self) -> list[Path]:
        """The files with weights that an index names, or that are there."""
        for index in (INDEX, OLD_INDEX):
            shards = (read_json(self.folder / index) or {}).get("weight_map")
            if isinstance(shards, dict):
                return [self.folder / name for name in sorted(set(shards.values()))]
        return sorted(self.folder.glob("*.safetensors")) or sorted(self.folder.glob("*.bin"))

    @cached_property
    def headers(self) -> dict[Path, dict[str, Any]]:
        """The headers of the safetensors files that are there."""
        return {file: header(file) for file in self.weight_files if file.suffix == ".safetensors" and file.is_file()}

    @property
    def tensors(self) -> dict[str, list[int]] | None:
        """The shape of each tensor by its name; None where they are in another format."""
        if not self.headers:
            return None
        return {name: about["shape"] for each in self.headers.values() for name, about in each.items()}

    def is_whole(self, file: Path) -> bool:
        """Whether a file is as long as its header says; True for other formats."""
        if file not in self.headers:
            return True
        ends = [about["data_offsets"][1] for about in self.headers[file].values()]
        return bool(self.headers[file]) and file.stat().st_size >= max(ends)

    @property
    def has_tokenizer(self) -> bool:
        return any(next(self.folder.glob(name), None) for name in TOKENIZERS)

    @property
    def has_chat_template(self) -> bool:
        names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")
        config = read_json(self.folder / "tokenizer_config.json") or {}
        return bool(config.get("chat_template")) or any((self.folder / name).exists() for name in names)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model is made for; None where config.json does not say."""
        found = [number for name in POSITIONS if isinstance(number := self.setting(name), int) and number > 0]
        if not found:
            return None
        ropes = [each for name in ("rope_scaling", "rope_parameters") if isinstance(each := self.setting(name), dict)]
        ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]  # by type of layer
        return max(found[0], *(stretched(rope, found[0]) for rope in ropes), 0)


@cache
def files_of(folder: Path) -> ModelFiles:
    """The files of a folder, read once for all jobs of a sweep."""
    return ModelFiles(folder)


def stretched(rope: dict[str, Any], positions: int) -> int:
    """The positions under a scaling of the rotary embedding."""
    if rope.get("rope_type", rope.get("type")) not in STRETCHED:
        return positions
    return int(float(rope.get("factor") or 1.0) * int(rope.get("original_max_position_embeddings") or positions))


def read_json(file: Path) -> dict[str, Any] | None:
    """A JSON object, or None."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def header(file: Path) -> dict[str, Any]:
    """The tensors that a safetensors file names: 8 bytes with the length of the header, then the header as JSON.
    Empty where that cannot be read."""
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
    """The source of transformers' table of model types, which names each in quotes."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    auto = Path(spec.origin).parent / "models" / "auto"
    return "".join(file.read_text() for file in auto.glob("*.py"))
