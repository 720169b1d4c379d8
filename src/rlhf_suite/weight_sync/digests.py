"""What trainer and engine agree on about a set of weights: names, shapes, places, and a digest of every tensor.

The digest of a tensor of n numbers with bit patterns b_1 .. b_n (as signed integers) is the pair

    sum_i b_i  and  sum_i i * b_i      (both modulo 2^64)

so one changed bit, two swapped rows or a shifted slice change it. It is a checksum against accidents, not against
intent. Zero has one pattern: -0 and subnormal numbers count as 0, because matrix kernels need not preserve them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rlhf_suite.errors import RunError

# Elements digested at a time: what stays in a CPU's cache, what keeps a GPU busy.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightSyncError(RunError):
    """The engine does not hold what the trainer sent; the message names the first wrong tensor."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a published set."""

    name: str  # as in the model's checkpoint
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", ...
    offset: int  # bytes into the file or bucket
    nbytes: int
    digest: str  # "" when syncs are not checked

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor inside the bytes [n] uint8 it was packed into; shares their memory."""
        raw = flat[self.offset : self.offset + self.nbytes]
        return raw.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class Manifest:
    """What was published, and where: the file at `path`, or without one the stream that engines are connected to."""

    version: int
    entries: tuple[TensorEntry, ...] = ()  # of a stream: empty in what the engine is given, headers carry them
    path: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def as_update_info(self) -> dict[str, Any]:
        """Plain values for vLLM's update_weights, which may serialise them for its worker processes."""
        return {
            "version": self.version,
            "path": self.path,
            "entries": [asdict(entry) for entry in self.entries] if self.path else [],
        }


@dataclass(frozen=True)
class SyncReport:
    """What an engine proved about a sync. All zero when syncs are not checked."""

    received: int  # tensors whose digest was right on arrival
    read_back: int  # of these, tensors whose digest was right again in the model after loading
    not_readable: tuple[str, ...]  # the rest: fused or sharded in a way that cannot be read back
    seconds: float = 0.0


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as [nbytes] uint8; a copy only when it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """Position-dependent checksum of a tensor on any device; equal values of equal type have equal digests."""
    flat = tensor.detach().reshape(-1)
    chunk = _CHUNK[flat.device.type]
    places = torch.arange(1, min(chunk, flat.numel()) + 1, device=flat.device)
    plain = torch.zeros((), dtype=torch.int64, device=flat.device)
    placed = torch.zeros_like(plain)
    for start in range(0, flat.numel(), chunk):
        bits = _bits(flat[start : start + chunk])
        total = bits.sum()
        plain += total
        placed += (bits * places[: len(bits)]).sum() + start * total
    return "{:016x}{:016x}".format(*(value % (1 << 64) for value in torch.stack([plain, placed]).tolist()))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Bit patterns as int64, zero and subnormal numbers as 0."""
    if values.is_floating_point():
        values = values.masked_fill(values.abs() < torch.finfo(values.dtype).tiny, 0.0)
    return values.view(_INTEGERS[values.element_size()]).to(torch.int64)


def compare(what: str, entry: TensorEntry, tensor: torch.Tensor) -> str | None:
    """None if `tensor` is what the entry says, else a sentence that names the tensor."""
    found = digest(tensor)
    if found == entry.digest:
        return None
    kind = f"{list(entry.shape)} {entry.dtype}"
    return f"tensor {entry.name} {kind} {what}: digest {found}, the trainer's is {entry.digest}"


def entries_from_plain(entries: Sequence[dict[str, Any]]) -> list[TensorEntry]:
    """Entries from their plain-value form (lists for tuples after serialisation)."""
    return [TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries]
