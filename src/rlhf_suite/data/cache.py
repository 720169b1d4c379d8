"""The cache of encoded rows on disk: the name of an entry, and which entries are removed when the cache is too large.

An entry is a folder. Its name is a fingerprint of everything that the encoding depends on. Every reader holds a shared
lock on one file of the entry while the entry is open, in any process on any node; the lock ends with the process. An
entry is removed only under an exclusive lock, and it is renamed first: a reader that opens it at that moment finds
either the whole entry or nothing. On a file system without locks nothing is removed.
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

from rlhf_suite.config.declarations import data
from rlhf_suite.data.render import NUM_EMBEDDINGS
from rlhf_suite.disk import file_digest, modified_at
from rlhf_suite.locks import lock


def open_locked(file: Path) -> IO[bytes]:
    """Open `file` of an entry with a shared lock that protects the entry until the result is closed.

    The modification time of the file is set to now, since the least recently used entry is removed first.

    Raises:
        OSError: the file does not exist, or its entry is being removed.
    """
    lock_file = file.open("rb")
    try:
        if not lock(lock_file, shared=True):
            raise FileNotFoundError(file)
        if not os.path.samestat(os.fstat(lock_file.fileno()), file.stat()):
            raise FileNotFoundError(file)
        with contextlib.suppress(PermissionError):  # the cache of another user
            os.utime(file)
    except BaseException:
        lock_file.close()
        raise
    return lock_file


def evict(cache: Path, mark: str, max_bytes: float) -> list[Path]:
    """Remove entries (folders of `cache`) until the rest takes at most `max_bytes`, or is in use. Return what was
    removed.

    The entry whose file `mark` has the oldest modification time is removed first.
    """
    sizes = dict[Path, int]()
    for folder in cache.glob("[!.]*"):
        with contextlib.suppress(OSError):  # another process is removing it
            if (folder / mark).is_file():
                sizes[folder] = sum(file.stat().st_size for file in folder.iterdir())
    total, gone = sum(sizes.values()), list[Path]()
    for folder in sorted(sizes, key=lambda entry: modified_at(entry / mark)):
        if total <= max_bytes:
            break
        if remove_unless_open(folder, mark):
            gone.append(folder)
            total -= sizes[folder]
    return gone


def remove_unless_open(folder: Path, mark: str) -> bool:
    """Remove an entry and return True; return False if it is open somewhere."""
    aside = folder.with_name(f".{folder.name}.old.{os.getpid()}")
    try:
        with (folder / mark).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.rename(aside)
    except OSError:  # it is in use, another process is removing it, or it belongs to another user
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


# Flags of `data` that choose rows or how they are used. They do not change how one row is encoded.
NOT_ENCODED = {
    *("dataset", "dataset_probs", "dataset_split", "prompt_dataset", "prompt_probs", "prompt_split", "max_samples"),
    *("pretrain_dataset", "pretrain_probs", "pretrain_split", "pretrain_key"),
    *("dataloader_num_workers", "cache_enable", "cache_max_gb", "pack_to_max_len", "max_skipped_share"),
}


def fingerprint(*values: object) -> str:
    """Return a fingerprint (SHA-256, hexadecimal) of the values and of the code that encodes rows."""
    text = json.dumps([_plain(value, {}) for value in values] + [_code()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any, tokenizers: dict[int, str]) -> Any:
    """Return an encoder as JSON values: its class and its attributes, recursively; a tokenizer as a digest of its
    files."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, tokenizers) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, tokenizers) for key, item in value.items()}
    if hasattr(value, "save_pretrained"):
        if id(value) not in tokenizers:
            tokenizers[id(value)] = f"{_tokenizer(value)} {getattr(value, NUM_EMBEDDINGS, None)}"
        return tokenizers[id(value)]
    if is_dataclass(value):
        attributes = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in NOT_ENCODED}
    else:
        attributes = vars(value)
    return {"class": type(value).__qualname__, **_plain(attributes, tokenizers)}


def _tokenizer(tokenizer: Any) -> str:
    """Return a digest of all files that `save_pretrained` writes: vocabulary, merges, special tokens, chat template."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return " ".join(f"{file.name} {file_digest(file)}" for file in files)


@lru_cache(maxsize=1)
def _code() -> list[str]:
    """Return digests of this package's source and the versions of the tokenizer libraries: other code may encode
    differently."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(data.__file__ or "")]
    return [version("transformers"), version("tokenizers"), *map(file_digest, files)]
