"""Writing the weights of a folder."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


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
