"""What an encoder's work depends on, as a digest: the name under which its results are kept."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_suite.disk import file_digest

# Flags of `data` that say which rows there are and how they are used, not what becomes of a row.
NOT_ENCODED = {
    *("dataset", "dataset_probs", "dataset_split", "prompt_dataset", "prompt_probs", "prompt_split", "max_samples"),
    *("dataloader_num_workers", "cache_enable", "cache_max_gb", "pack_to_max_len", "max_skipped_share"),
}


def digest(*values: object) -> str:
    """Of everything in `values`, and of the code that encodes."""
    text = json.dumps([_plain(value, {}) for value in values] + [_code()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any, tokenizers: dict[int, str]) -> Any:
    """An encoder as JSON: its class and attributes, all the way down; a tokenizer as a digest of its files."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each, tokenizers) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each, tokenizers) for key, each in value.items()}
    if hasattr(value, "save_pretrained"):
        if id(value) not in tokenizers:
            tokenizers[id(value)] = _tokenizer(value)
        return tokenizers[id(value)]
    if is_dataclass(value):
        attributes = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in NOT_ENCODED}
    else:
        attributes = vars(value)
    return {"class": type(value).__qualname__, **_plain(attributes, tokenizers)}


def _tokenizer(tokenizer: Any) -> str:
    """A digest of all that `save_pretrained` writes: vocabulary, merges, special tokens, chat template."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return " ".join(f"{file.name} {file_digest(file)}" for file in files)


@lru_cache(maxsize=1)
def _code() -> list[str]:
    """Of this package's source and of the libraries that tokenise: other code may encode otherwise."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [version("transformers"), version("tokenizers"), *map(file_digest, files)]
