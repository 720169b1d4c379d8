"""GPU memory lent to another process on the same GPU: torch's CUDA IPC handle as JSON, so that nobody unpickles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from rlhf_suite.weight_sync.digests import TensorEntry, entries_from_plain

# What torch.multiprocessing's rebuild_cuda_tensor takes after the seven that say what the tensor is: for [n] uint8
# those are known. bytes cross as hex digits.
FIELDS = (
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
BYTES = ("storage_handle", "ref_counter_handle", "event_handle")


def export_handle(entries: Sequence[TensorEntry], flat: torch.Tensor) -> str:
    """What a bucket holds and where it is; `flat` [n] uint8 on a GPU must stay as it is until the borrower is done."""
    from torch.multiprocessing.reductions import reduce_tensor

    return handle_to_json(entries, reduce_tensor(flat)[1])


def handle_to_json(entries: Sequence[TensorEntry], arguments: Sequence[Any]) -> str:
    """`arguments`: those of torch's rebuild_cuda_tensor, all fifteen."""
    fields = dict(zip(FIELDS, arguments[7:], strict=True))
    fields |= {name: fields[name].hex() for name in BYTES}
    return json.dumps([[asdict(entry) for entry in entries], arguments[1][0], arguments[3], fields])


def handle_from_json(handle_to_json: str, device: int) -> tuple[list[TensorEntry], tuple[Any, ...]]:
    """The inverse of `handle_to_json` on this process's `device`, whose index may differ from the lender's."""
    entries, size, offset, fields = json.loads(handle_to_json)
    fields |= {name: bytes.fromhex(fields[name]) for name in BYTES}
    tensor = (torch.Tensor, (size,), (1,), offset, torch.storage.TypedStorage, torch.uint8, device)
    return entries_from_plain(entries), (*tensor, *(fields[name] for name in FIELDS))


def open_handle(handle_to_json: str, device: int) -> tuple[list[TensorEntry], torch.Tensor]:
    """A bucket's entries, and its memory itself: copy what is to outlive the loan."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    entries, arguments = handle_from_json(handle_to_json, device)
    return entries, rebuild_cuda_tensor(*arguments)
