"""Which sets of encoded rows stay on the disk: those in use, and of the others the latest used, up to a bound.

Whoever reads a set holds a shared lock on one of its files for as long as it is open, in whatever process and on
whatever node; the lock goes with the process. A set is removed under an exclusive lock alone, and is renamed first, so
that who opens it at that moment finds all of it or nothing. Where the file system has no locks nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from rlhf_suite.disk import file_digest
from rlhf_suite.locks import lock


def open_locked(file: Path) -> IO[bytes]:
    """Open `file` of a set and hold the set for as long as the result lives; the time of its last use is now.

    Raises:
        OSError: it is not there, or is just being removed.
    """
    lock_file = file.open("rb")
    try:
        if not lock(lock_file, shared=True):
            raise FileNotFoundError(file)
        if not os.path.samestat(os.fstat(lock_file.fileno()), file.stat()):
            raise FileNotFoundError(file)
        with contextlib.suppress(PermissionError):  # a cache of somebody else's
            os.utime(file)
    except BaseException:
        lock_file.close()
        raise
    return lock_file


def evict(cache: Path, mark: str, max_bytes: float) -> list[Path]:
    """Remove sets, folders of `cache`, until they have `max_bytes` together or all that are left are in use; the one
    whose file `mark` was touched longest ago goes first. Returns what is gone."""
    sets = [folder for folder in cache.glob("[!.]*") if (folder / mark).is_file()]
    sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for folder in sets}
    total, gone = sum(sizes.values()), list[Path]()
    for folder in sorted(sets, key=lambda each: (each / mark).stat().st_mtime):
        if total <= max_bytes:
            break
        if remove_unless_open(folder, mark):
            gone.append(folder)
            total -= sizes[folder]
    return gone


def remove_unless_open(folder: Path, mark: str) -> bool:
    """Remove a set unless somebody has it open."""
    aside = folder.with_name(f".{folder.name}.old.{os.getpid()}")
    try:
        with (folder / mark).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.rename(aside)
    except OSError:  # it is in use, another process removes it, or it is not ours
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


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
