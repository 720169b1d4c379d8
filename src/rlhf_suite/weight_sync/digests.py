"""What trainer and engine compare in a weight sync: names, shapes, positions, and a digest of every tensor.

The digest of a tensor of n numbers with bit patterns b_1 .. b_n (as signed integers) is the pair

    sum_i b_i  and  sum_i i * b_i      (both modulo 2^64)

so a changed bit, two swapped rows or a shifted slice change it. It is a checksum against errors, not against attacks.
Zero has one pattern: -0 and subnormal numbers count as 0, because matrix kernels need not preserve them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch

from rlhf_suite.errors import RunError

# Elements digested at a time: few enough for a CPU's cache, enough to keep a GPU busy.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
WHOLE, BASE, ADAPTER = "whole", "base", "adapter"  # what is sent: adapters merged, the model without them, them alone
CONSEQUENCE = "it would sample from another model than the one trained"  # of an engine that lacks a tensor
WITHOUT_ADAPTERS = "Write vllm.sync_adapters=false: engines then get the weights with adapters merged"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightSyncError(RunError):
    """The engine does not have the weights that the trainer sent. The message names the first wrong tensor."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a weight sync, or a part of one that is larger than a bucket."""

    name: str  # its name in the model's checkpoint
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # "float32", "bfloat16", ...
    offset: int  # in bytes, from the start of the file or bucket
    nbytes: int  # of the tensor, or of the part
    digest: str  # of the whole tensor; "" if syncs are not checked, and for a part that is not the last
    begin: int = 0  # bytes of the tensor before this part

    @property
    def size(self) -> int:
        """Return the bytes of the whole tensor."""
        return prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    @property
    def is_last(self) -> bool:
        """Return whether the tensor is complete with this part of it."""
        return self.begin + self.nbytes == self.size

    @property
    def whole(self) -> TensorEntry:
        """Return the entry of the whole tensor: itself, or for a part one that begins at 0."""
        return self if self.nbytes == self.size else replace(self, offset=0, nbytes=self.size, begin=0)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this tensor inside the bytes [n] uint8 that it was packed into, sharing their memory."""
        raw = flat[self.offset : self.offset + self.nbytes]
        return raw.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class Manifest:
    """What was sent, and where: in the file at `path`, or without a path in the stream that the engines are connected
    to."""

    version: int
    entries: tuple[TensorEntry, ...] = ()  # for a stream the engine's manifest has none; headers carry them
    path: str | None = None  # until the next sync, if the sender keeps what it sent
    part: str = WHOLE

    @property
    def nbytes(self) -> int:
        """Return the size of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    def as_update_info(self) -> dict[str, Any]:
        """Return plain values for vLLM's update_weights, which may serialise them for its worker processes."""
        return {
            "version": self.version,
            "path": self.path,
            "part": self.part,
            "entries": [asdict(entry) for entry in self.entries] if self.path else [],
        }


@dataclass(frozen=True)
class SyncReport:
    """What an engine verified about a weight sync. All counts are 0 if syncs are not checked."""

    received: int  # tensors whose digest was right on arrival
    read_back: int  # those of them whose digest was also right in the model after loading
    not_readable: tuple[str, ...]  # the other ones: no worker has them, or in a form that cannot be read back
    seconds: float = 0.0
    guessed: int = 0  # tokens that speculative decoding proposed since the sync before
    accepted: int = 0  # those of them that became part of a response


@dataclass(frozen=True)
class Part:
    """What one worker of an engine has of a tensor."""

    numbers: int  # of the whole tensor
    placed: int  # those of them that the worker has loaded; 0: it has no part of the tensor
    is_read: bool  # whether all of these were read back


@dataclass(frozen=True)
class Attested:
    """What one worker of an engine found in its model after a weight sync."""

    parts: Mapping[str, Part]
    is_checked: bool = True  # whether the tensors came with digests
    needs_all: bool = False  # whether every tensor must have a place: those of an adapter
    wrong: str | None = None  # the first difference


def combine_reports(workers: Sequence[Attested]) -> SyncReport:
    """Return what the workers of an engine verified together. A tensor counts as read back if all workers that have a
    part of it have read it.

    Raises:
        WeightSyncError: a worker found a difference, or all together have only a part of a tensor.
    """
    for worker in workers:
        if worker.wrong:
            raise WeightSyncError(worker.wrong)
    unread = []
    for name, whole in workers[0].parts.items():
        parts = [worker.parts[name] for worker in workers if worker.parts[name].placed]
        placed = sum(part.placed for part in parts)
        if not placed and any(worker.needs_all for worker in workers):
            raise WeightSyncError(f"tensor {name} has no place in vLLM's model: {CONSEQUENCE}. {WITHOUT_ADAPTERS}")
        if 0 < placed < whole.numbers:
            raise WeightSyncError(
                f"tensor {name} has {whole.numbers} numbers, and vLLM's model has a place for {placed}: {CONSEQUENCE}"
            )
        if not (parts and all(part.is_read for part in parts)):
            unread.append(name)
    if not workers[0].is_checked:
        return SyncReport(0, 0, ())
    return SyncReport(len(workers[0].parts), len(workers[0].parts) - len(unread), tuple(unread))


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as [nbytes] uint8; a copy only if it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """Return the position-dependent checksum of a tensor on any device. Equal values of equal type
    have equal digests."""
    return as_digests([digest_sums(tensor)])[0]


def digest_sums(tensor: torch.Tensor, begin: int = 0) -> torch.Tensor:
    """Return the two sums of a tensor, or of a part of one that begins with its element `begin`: [2] int64 on its
    device. The sums of the parts of a tensor add up to its own. The host does not wait for the device."""
    flat = tensor.detach().reshape(-1)
    chunk = _CHUNK[flat.device.type]
    places = torch.arange(1, min(chunk, flat.numel()) + 1, device=flat.device)
    plain = torch.zeros((), dtype=torch.int64, device=flat.device)
    placed = torch.zeros_like(plain)
    for start in range(0, flat.numel(), chunk):
        bits = _bits(flat[start : start + chunk])
        total = bits.sum()
        plain += total
        placed += (bits * places[: len(bits)]).sum() + (begin + start) * total
    return torch.stack([plain, placed])


def as_digests(sums: Sequence[torch.Tensor]) -> list[str]:
    """Return the digests of so many pairs of sums. The host reads all of them at once."""
    pairs = torch.stack(list(sums)).tolist() if sums else []
    return ["{:016x}{:016x}".format(*(value % (1 << 64) for value in pair)) for pair in pairs]


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return bit patterns as int64, zero and subnormal numbers as 0."""
    if values.is_floating_point():
        values = values.masked_fill(values.abs() < torch.finfo(values.dtype).tiny, 0.0)
    return values.view(_INTEGERS[values.element_size()]).to(torch.int64)


def difference(problem: str, entry: TensorEntry, arrived: str) -> str | None:
    """Return None if `arrived` is the digest of the entry, else a sentence that names the tensor. `problem` says where
    it was found to be wrong."""
    if arrived == entry.digest:
        return None
    kind = f"{list(entry.shape)} {entry.dtype}"
    return f"tensor {entry.name} {kind} {problem}: digest {arrived}, the trainer's is {entry.digest}"


def entries_from_plain(entries: Sequence[dict[str, Any]]) -> list[TensorEntry]:
    """Return entries from plain values, in which serialisation has turned tuples into lists."""
    return [TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries]
