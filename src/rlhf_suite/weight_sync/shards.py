"""Which part of a tensor of the checkpoint a worker of a split engine holds, by the rules of vLLM's layers.

Every worker receives whole tensors, so each can say what its own part must be, and compare it with what its layers hold
after loading.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer

from rlhf_suite.weight_sync.digests import TensorEntry, digest
from rlhf_suite.weight_sync.read_back import ModelReader, Place


def own_entry(reader: ModelReader, entry: TensorEntry, whole: Tensor) -> TensorEntry | None:
    """Return the entry of this worker's part of a tensor that has arrived, or None if it has no part of it: its layer
    is in another stage of the pipeline, or is none that the reader knows. Without a digest nothing is compared."""
    if not entry.digest:
        return entry
    place = reader.place(entry.name)
    if place is None or isinstance(place.module, PPMissingLayer):
        return None
    part = own_part(place, whole)
    return entry if part is whole else replace(entry, shape=tuple(part.shape), digest=digest(part))


def own_part(place: Place, whole: Tensor) -> Tensor:
    """Return what this worker holds of a tensor [N, ...] of the checkpoint.

    It is the whole tensor if the layer is not split, and if it is split by a rule that is not known here. Then its
    values in the model have another shape, and are not read back.
    """
    module: Any = place.module
    kind = type(module)
    size, rank = getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    if size == 1 or place.path.endswith("conv1d"):
        return whole
    if kind is RowParallelLinear:
        return whole.chunk(size, 1)[rank] if place.leaf == "weight" else whole
    if kind in (VocabParallelEmbedding, ParallelLMHead):
        return whole[module.shard_indices.org_vocab_start_index : module.shard_indices.org_vocab_end_index]
    sizes = section_sizes(place, len(whole))
    if not sizes:
        return whole
    first = 0 if place.is_whole else place.siblings.index(place.part)
    parts = []
    for number, section in enumerate(whole.split(sizes), first):
        # With more workers than key/value heads several workers hold the same head.
        copies = module.num_kv_head_replicas if kind is QKVParallelLinear and number > 0 else 1
        parts.append(section.chunk(size // copies)[rank // copies])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def section_sizes(place: Place, rows: int) -> list[int]:
    """Return the rows of each section of a tensor that vLLM splits by itself, such as q, k and v in one tensor; [] if
    the layer is none of those known here."""
    module: Any = place.module
    kind = type(module)
    if kind is ColumnParallelLinear:
        return [rows]
    if kind is MergedColumnParallelLinear:
        sizes = list(module.output_sizes)
    elif kind is QKVParallelLinear:
        kv_heads = module.total_num_kv_heads
        sizes = [module.total_num_heads * module.head_size, kv_heads * module.head_size, kv_heads * module.v_head_size]
    else:
        return []
    if place.is_whole:
        return sizes
    return [rows] if len(place.siblings) == len(sizes) else []
