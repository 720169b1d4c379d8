"""Tensors packed end to end into buckets of bytes, the unit in which weights travel.

No bucket is larger than `BUCKET_BYTES`: a larger tensor travels in parts, each in a bucket of its own, so neither side
holds a second copy of an embedding. It is cast, sent and digested part by part; its digest comes with its last part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from rlhf_suite.weight_sync.digests import TensorEntry, as_bytes, as_digests, digest_sums, dtype_name

ALIGNMENT = 64  # bytes; views of any dtype need aligned offsets
BUCKET_BYTES = 256 << 20  # a multiple of ALIGNMENT

NamedWeights = Iterable[tuple[str, torch.Tensor]]
Bucket = tuple[list[TensorEntry], torch.Tensor]  # tensors packed end to end into [n] uint8


def cut(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the numbers of a tensor in their order, as [n] of at most BUCKET_BYTES each: floating-point numbers in
    `dtype`, others in their own type."""
    flat = tensor.detach().reshape(-1)
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    size = BUCKET_BYTES // kind.itemsize
    for start in range(0, max(1, flat.numel()), size):
        yield flat[start : start + size].to(kind)


def pack_buckets(weights: NamedWeights, dtype: torch.dtype, check: bool, device: torch.device) -> Iterator[Bucket]:
    """Yield the weights as buckets on `device`. `check`: with digests, which are read once per bucket."""
    bucket = OpenBucket(check)
    for name, tensor in weights:
        begin, sums = 0, None
        for part in cut(tensor, dtype):
            if bucket.parts and bucket.size + part.nbytes > BUCKET_BYTES:
                yield bucket.close()
                bucket = OpenBucket(check)
            if check:
                more = digest_sums(part, begin // part.element_size())
                sums = more if sums is None else sums + more
            entry = TensorEntry(name, tuple(tensor.shape), dtype_name(part.dtype), bucket.size, part.nbytes, "", begin)
            bucket.add(entry, as_bytes(part).to(device), sums)
            begin += part.nbytes
    if bucket.parts:
        yield bucket.close()


class OpenBucket:
    """A bucket that tensors are still added to."""

    def __init__(self, check: bool) -> None:
        self.check = check
        self.entries: list[TensorEntry] = []
        self.parts: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []  # of each entry that is the last part of its tensor
        self.size = 0

    def add(self, entry: TensorEntry, raw: torch.Tensor, sums: torch.Tensor | None) -> None:
        """Add the bytes [n] uint8 of a tensor or of a part of it, and the sums of the tensor up to their end."""
        padding = torch.zeros(-len(raw) % ALIGNMENT, dtype=torch.uint8, device=raw.device)
        self.entries.append(entry)
        self.parts += [raw, padding]
        self.size += len(raw) + len(padding)
        if sums is not None and entry.is_last:
            self.sums.append(sums)

    def close(self) -> Bucket:
        """Return the entries and the bytes, whose memory is their own."""
        proofs = iter(as_digests(self.sums))
        entries = [replace(e, digest=next(proofs)) if self.check and e.is_last else e for e in self.entries]
        return entries, torch.cat(self.parts)


def whole_entries(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Return one entry for each tensor whose last part is among `entries`."""
    return [entry.whole for entry in entries if entry.is_last]


def join_parts(buckets: Iterable[Bucket]) -> Iterator[tuple[list[TensorEntry], list[torch.Tensor]]]:
    """Yield the tensors of buckets when they are complete. Those in one bucket share its memory; one that came in parts
    has memory of its own, which its parts are copied into."""
    joined = torch.empty(0, dtype=torch.uint8)
    for entries, flat in buckets:
        tensors = list[torch.Tensor]()
        for entry in entries:
            if entry.nbytes == entry.size:
                tensors.append(entry.view(flat))
                continue
            if entry.begin == 0:
                joined = torch.empty(entry.size, dtype=torch.uint8, device=flat.device)
            joined[entry.begin : entry.begin + entry.nbytes] = flat[entry.offset : entry.offset + entry.nbytes]
            if entry.is_last:
                tensors.append(entry.whole.view(joined))
        if tensors:
            yield whole_entries(entries), tensors
