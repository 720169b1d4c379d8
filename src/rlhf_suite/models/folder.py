"""Writing a folder of weights, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


@contextmanager
def written_aside(path: Path, replace: bool = True) -> Iterator[Path]:
    """A temporary folder that becomes `path` when everything in it is on the disk; gone on an error.

    Without `replace` a folder that another process has put there meanwhile is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside, old = (path.parent / f".{path.name}.{kind}.{os.getpid()}" for kind in ("new", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for file in aside.iterdir():
            flush(file)
        if replace and path.exists():
            path.rename(old)
        try:
            aside.rename(path)
        except OSError:  # a folder that is not empty is never renamed over
            if replace or not path.exists():
                if old.exists():
                    old.rename(path)
                raise
        flush(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """safetensors shards of 5 GB at most, with an index where there are several."""
    split = split_torch_state_dict_into_shards(
        weights, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_BYTES
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=1))


def flush(path: Path) -> None:
    """Have a file, or the entries of a folder, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
