"""The trainer's side of a weight sync: a stream of (checkpoint name, whole tensor) is sent, a bucket at a time.

`ShmSender` writes one file in shared memory, which every engine on the node maps. `StreamSender` broadcasts buckets to
engines on any node, by gloo or NCCL. `IpcSender` gives the engine on the same GPU a handle of the bucket. Every tensor
gets a digest when it is sent.

All trainer ranks iterate over the same stream, since gathering a sharded parameter is a collective operation. Rank 0
sends; with ipc every rank sends, to the engine on its own GPU.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

import torch
import torch.distributed as dist

from rlhf_suite.distributed.world import open_store
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_files import ANY_SIZE, DamagedFile, open_regular
from rlhf_suite.weight_sync.buckets import ALIGNMENT, Bucket, NamedWeights, cut, pack_buckets, whole_entries
from rlhf_suite.weight_sync.cuda_ipc import lend_buckets, offer_proof
from rlhf_suite.weight_sync.digests import (
    BASE,
    WHOLE,
    Manifest,
    TensorEntry,
    WeightSyncError,
    as_bytes,
    as_digests,
    digest_sums,
    dtype_name,
)
from rlhf_suite.weight_sync.stream import broadcast, send_buckets

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

SHM_FOLDER = Path("/dev/shm")
SHM_PREFIX = "rlhf-suite-weights-"
CHANNEL_BYTES = 64  # that prove a channel


class ShmSender:
    """Sends weights through a file in /dev/shm, to engines on this node.

    `dtype` is the data type of the engines; floating-point tensors are sent in it. `check`: compute digests. `keep`:
    the weights that were sent last stay in memory, for an engine that loads them while the policy trains on or that is
    started again. Then the file has no name, so nothing is left behind, however this process ends.
    """

    def __init__(self, dtype: torch.dtype, check: bool, keep: bool = False) -> None:
        self._dtype, self._check, self._keep = dtype, check, keep
        self._file: IO[bytes] | None = None
        _remove_orphans()
        atexit.register(self.close)

    def send(self, version: int, weights: NamedWeights, part: str = WHOLE) -> Manifest:
        """Write the file. It stays until the next call, or without `keep` until `release`, which must be called after
        the engines have loaded it."""
        self.close()
        self._file = _create_file()
        path = Path(self._file.name)
        try:
            entries = self._write(self._file, weights)
            self._file.flush()
        except OSError as error:
            self.close()
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(
                f"{SHM_FOLDER} is too small for the weights; give the machine more shared memory (docker run "
                "--shm-size) or set vllm.sync_backend=gloo (cpu) or nccl (cuda)"
            ) from None
        if self._keep:
            path.unlink()
            path = Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
        return Manifest(version, tuple(entries), str(path), part)

    def _write(self, file: IO[bytes], weights: NamedWeights) -> list[TensorEntry]:
        """Append all tensors to the file, a bucket of numbers at a time, and return their entries."""
        entries, sums = list[TensorEntry](), list[torch.Tensor]()
        for name, tensor in weights:
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            offset, kind, total = file.tell(), tensor.dtype, torch.zeros(2, dtype=torch.int64, device=tensor.device)
            for part in cut(tensor, self._dtype):
                kind = part.dtype
                if self._check:
                    total += digest_sums(part, (file.tell() - offset) // kind.itemsize)
                file.write(as_bytes(part.cpu()).numpy().data)
            sums.append(total)
            shape = tuple(tensor.shape)
            entries.append(TensorEntry(name, shape, dtype_name(kind), offset, file.tell() - offset, ""))
        proofs = as_digests(sums)
        return [replace(e, digest=proof) for e, proof in zip(entries, proofs, strict=True)] if self._check else entries

    def release(self) -> None:
        """Remove the file, unless it is kept. Its memory is free when no engine maps it any more."""
        if not self._keep:
            self.close()

    def close(self) -> None:
        """Remove the file, and do not keep its memory."""
        if self._file is not None:
            Path(self._file.name).unlink(missing_ok=True)
            self._file.close()
            self._file = None


class StreamSender:
    """Sends weights by broadcast of packed buckets to engines on any node: gloo from host memory, NCCL between GPUs.

    Rank 0 of the group is the trainer, the other ranks are engine workers. A header in the rendezvous store describes
    each bucket, so an engine needs no information in advance. `keep`: what was sent last stays in host memory, to be
    sent again while the model already has newer weights.
    """

    def __init__(
        self, backend: str, dtype: torch.dtype, check: bool, host: str, timeout_s: float, keep: bool = False
    ) -> None:
        self._backend, self._dtype, self._check, self._keep = backend, dtype, check, keep
        self._timeout = timedelta(seconds=timeout_s)
        self._store = open_store(host, self._timeout)
        self._group: Backend | None = None
        self._meeting = 0  # the number of the group
        self._headers: list[str] = []
        self._kept: list[Bucket] = []

    @property
    def port(self) -> int:
        """Return the port of the rendezvous store."""
        return int(self._store.port)

    def connect(self, world_size: int, meeting: int) -> str:
        """Wait until all `world_size` - 1 engine workers have joined the group. Each group has its own number."""
        self._group = make_group(self._backend, self._store, 0, world_size, self._timeout, meeting)
        self._meeting = meeting
        prove_channel(self._group, self._backend, self._device, is_sender=True)
        return ""

    def send(self, version: int, weights: NamedWeights, part: str = WHOLE) -> Manifest:
        """Send all weights, while the engines receive (`Engine.update_weights` with a Manifest without a path). A model
        without its adapters is not kept: it never changes."""
        if part != BASE:
            self._kept = []
        buckets = pack_buckets(weights, self._dtype, self._check, self._device)
        return self._send(version, buckets, self._keep and part != BASE, part)

    def send_again(self, version: int, part: str = WHOLE) -> Manifest | None:
        """Send what was sent last once more; return None if it was not kept."""
        return self._send(version, self._kept, False, part) if self._kept and part != BASE else None

    def _send(self, version: int, buckets: Iterable[Bucket], keep: bool, part: str) -> Manifest:
        assert self._group is not None, "connect() comes first"
        for key in self._headers:
            self._store.delete_key(key)
        self._headers, sent = [], list[TensorEntry]()
        announce = partial(self._announce, version, part)
        for entries, flat in send_buckets(self._group, buckets, self._device, announce):
            sent += whole_entries(entries)
            if keep:
                self._kept.append((entries, flat.cpu()))
        return Manifest(version, tuple(sent), part=part)

    def release(self) -> None:
        """Do nothing: a stream leaves nothing behind."""

    def close(self) -> None:
        """Leave the group."""
        self._group = None

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")

    def _announce(self, version: int, part: str, entries: list[TensorEntry]) -> None:
        """Put the description of the next bucket into the store."""
        key = header_key(self._meeting, version, part, len(self._headers))
        self._store.set(key, json.dumps([asdict(entry) for entry in entries]))
        self._headers.append(key)


class IpcSender:
    """Sends weights by CUDA IPC handle to the engine worker on this rank's own GPU (train.colocate_all). GPU only.

    Every trainer rank has a sender; rank 0 hosts the store, the others join at its port.
    """

    def __init__(self, dtype: torch.dtype, check: bool, host: str, port: int, timeout_s: float) -> None:
        self._dtype, self._check = dtype, check
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(host, port, is_master=False, timeout=timeout) if port else open_store(host, timeout)

    @property
    def port(self) -> int:
        """Return the port of the rendezvous store."""
        return int(self._store.port)

    def connect(self, world_size: int, meeting: int) -> str:
        """Share a few bytes with the engine on this GPU; return why that does not work, or ""."""
        return offer_proof(self._store, meeting, world_size - 1)

    def send(self, version: int, weights: NamedWeights, part: str = WHOLE) -> Manifest:
        """Share one bucket after the other with the engine. A bucket is reused when the engine has copied it."""
        buckets = pack_buckets(weights, self._dtype, self._check, torch.device("cuda"))
        return Manifest(version, tuple(lend_buckets(self._store, version, buckets)), part=part)

    def release(self) -> None:
        """Do nothing: a stream leaves nothing behind."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


Sender = ShmSender | StreamSender | IpcSender


def make_group(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta, meeting: int = 0) -> Backend:
    """Return a process group that is separate from the process's default group. Groups of one store that are made one
    after the other need different numbers (`meeting`)."""
    prefixed = dist.PrefixStore(f"weights/{meeting}", store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(prefixed, rank, size, options)


def prove_channel(group: Backend, backend: str, device: torch.device, is_sender: bool) -> None:
    """Send a few known bytes, so that a channel that does not work fails here, and not in the first sync. NCCL connects
    at the first broadcast only.

    Raises:
        WeightSyncError: they did not arrive.
    """
    known = torch.arange(CHANNEL_BYTES, dtype=torch.uint8, device=device)
    arrived = known.clone() if is_sender else torch.zeros_like(known)
    try:
        broadcast(group, arrived)
        works, reason = torch.equal(arrived, known), "other bytes arrived than were sent"
    except RuntimeError as error:
        works, reason = False, str(error)
    if not works:
        names = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
        raise WeightSyncError(
            f"trainer and engines cannot exchange weights by {backend}: {reason}. Name the network interface between "
            f"their nodes in {names}" + (", and see what NCCL_DEBUG=INFO prints" if backend == "nccl" else "")
        )


def header_key(meeting: int, version: int, part: str, bucket: int) -> str:
    """Return the key of a bucket's description in the store. Each part of a sync has other keys, and so have weights
    that are sent again, in a meeting of their own: who gets a key that the sender is about to delete would read another
    description, or none."""
    return f"header/{meeting}/{version}/{part}/{bucket}"


def _create_file() -> IO[bytes]:
    """Return a new file in shared memory, whose lock this process holds while it lives."""
    while True:
        path = SHM_FOLDER / f"{SHM_PREFIX}{uuid4().hex}"
        # No other user of the machine may read it, and it stays open.
        file = open(path, "xb", opener=partial(os.open, mode=0o600))  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # else another sender has taken it for an orphan before it was locked
            return file
        file.close()


def _remove_orphans() -> None:
    """Remove files whose sender was killed, so that nobody holds their lock any more. Everybody may write into the
    folder: a pipe of this name, which another user has made, is not waited for."""
    for path in SHM_FOLDER.glob(f"{SHM_PREFIX}*"):
        with suppress(OSError, DamagedFile), open_regular(path, ANY_SIZE) as file:  # in use, or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
