"""Sharing GPU memory with another process on the same GPU: torch's CUDA IPC handle as JSON, so that nothing is
unpickled. Handles of one bucket after the other go through a store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlhf_suite.weight_sync.buckets import Bucket, whole_entries
from rlhf_suite.weight_sync.digests import TensorEntry, entries_from_plain

# The arguments of torch.multiprocessing's rebuild_cuda_tensor after the seven that describe the tensor: for [n] uint8
# those seven are known. Values of type bytes are written as hexadecimal digits.
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
ANSWER = "because: "  # begins the answer of a worker: the store has no empty values
END_OF_BUCKETS = "end"  # stands in place of a bucket after the last one
PROOF_BYTES = 64  # that prove that two processes can share memory
PROOF_TIMEOUT = timedelta(seconds=60)  # for the answer of the other side


def offer_proof(store: dist.Store, meeting: int, workers: int) -> str:
    """Share a few known bytes with the engine on this GPU, and return why the engines' `workers` cannot read those of
    their trainers; "" if all of them can.

    In a container without the right to read the memory of other processes, and under WSL2, a handle cannot be opened.
    """
    reason, shared = "", None
    try:
        shared = share_known_bytes(store, meeting)
    except Exception as error:  # of CUDA, torch or the system: each means that this way is closed
        reason = one_line(error)
    answered = read_answers(store, meeting, workers)
    del shared  # its memory had to live until all have answered
    return reason or answered


def read_answers(store: dist.Store, meeting: int, workers: int) -> str:
    """Wait for the answers of all workers of engines, and return the first reason among them; "" if there is none."""
    answers = [answer_key(meeting, worker) for worker in range(1, workers + 1)]
    try:
        store.wait(answers, 2 * PROOF_TIMEOUT)
    except RuntimeError as error:
        return one_line(error)
    return next(filter(None, (store.get(answer).decode().removeprefix(ANSWER) for answer in answers)), "")


def answer_proof(store: dist.Store, meeting: int, worker: int, device: int) -> None:
    """Tell the trainer whether this worker of an engine, the `worker`-th of all, can read the bytes that it shares."""
    reason = ""
    try:
        key = proof_key(meeting, gpu_uuid())
        store.wait([key], PROOF_TIMEOUT)
        _, lent = open_handle(store.get(key).decode(), device)
        if not torch.equal(lent, known_bytes()):
            reason = "other bytes arrived than were shared"
        del lent
    except Exception as error:
        reason = one_line(error)
    store.set(answer_key(meeting, worker), ANSWER + reason)


def share_known_bytes(store: dist.Store, meeting: int) -> torch.Tensor:
    """Put the handle of known bytes into the store, and return these bytes."""
    known = known_bytes()
    torch.cuda.synchronize()
    store.set(proof_key(meeting, gpu_uuid()), export_handle((), known))
    return known


def known_bytes() -> torch.Tensor:
    return torch.arange(PROOF_BYTES, dtype=torch.uint8, device="cuda")


def proof_key(meeting: int, gpu: str) -> str:
    return f"ipc/proof/{meeting}/{gpu}"


def answer_key(meeting: int, worker: int) -> str:
    return f"ipc/proof/{meeting}/worker/{worker}"


def one_line(error: Exception) -> str:
    """Return the first line of an error, or its name if it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def lend_buckets(store: dist.Store, version: int, buckets: Iterable[Bucket]) -> list[TensorEntry]:
    """Share one bucket after the other with the engine on this GPU, and return the entries of all tensors. The memory
    of a bucket is free when the engine has copied it."""
    sent, gpu, number = list[TensorEntry](), gpu_uuid(), 0
    for entries, flat in buckets:
        torch.cuda.synchronize()
        key = bucket_key(version, number, gpu)
        store.set(key, export_handle(entries, flat))
        store.wait([key + "/done"])
        store.delete_key(key + "/done")
        sent, number = sent + whole_entries(entries), number + 1
    store.set(bucket_key(version, number, gpu), END_OF_BUCKETS)
    torch.cuda.ipc_collect()
    return sent


def copy_buckets(store: dist.Store, version: int, device: int) -> Iterator[Bucket]:
    """Yield copies of the buckets that the trainer on this GPU lends, whose index is `device` in this process."""
    number, gpu = 0, gpu_uuid()
    while (note := take_value(store, bucket_key(version, number, gpu))) != END_OF_BUCKETS:
        entries, lent = open_handle(note, device)
        flat = lent.clone()  # the loader keeps tensors; the sender reuses its bucket
        torch.cuda.synchronize()
        del lent
        store.set(bucket_key(version, number, gpu) + "/done", "1")
        yield entries, flat
        number += 1


def take_value(store: dist.Store, key: str) -> str:
    """Wait for the value of `key` in the store, remove it, and return it."""
    value = store.get(key).decode()
    store.delete_key(key)
    return str(value)


def bucket_key(version: int, bucket: int, gpu: str) -> str:
    """Return the key of a bucket's handle for one GPU in the store."""
    return f"ipc/{version}/{bucket}/{gpu}"


def gpu_uuid() -> str:
    """Return the UUID of this process's GPU, whatever its index here."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def export_handle(entries: Sequence[TensorEntry], flat: torch.Tensor) -> str:
    """Return the entries of a bucket and the handle of its memory as JSON.

    `flat` [n] uint8 on a GPU must not change until the receiver has copied it.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    return handle_to_json(entries, reduce_tensor(flat)[1])


def handle_to_json(entries: Sequence[TensorEntry], arguments: Sequence[Any]) -> str:
    """Return the entries and the 15 arguments of torch's rebuild_cuda_tensor as JSON."""
    fields = dict(zip(FIELDS, arguments[7:], strict=True))
    fields |= {name: fields[name].hex() for name in BYTES}
    return json.dumps([[asdict(entry) for entry in entries], arguments[1][0], arguments[3], fields])


def handle_from_json(text: str, device: int) -> tuple[list[TensorEntry], tuple[Any, ...]]:
    """Return the inverse of `handle_to_json` on this process's `device`, whose index may differ from the sender's."""
    entries, size, offset, fields = json.loads(text)
    fields |= {name: bytes.fromhex(fields[name]) for name in BYTES}
    tensor = (torch.Tensor, (size,), (1,), offset, torch.storage.TypedStorage, torch.uint8, device)
    return entries_from_plain(entries), (*tensor, *(fields[name] for name in FIELDS))


def open_handle(text: str, device: int) -> tuple[list[TensorEntry], torch.Tensor]:
    """Return the entries of a bucket and its memory, without a copy. Copy what is needed after the sender reuses the
    bucket."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    entries, arguments = handle_from_json(text, device)
    return entries, rebuild_cuda_tensor(*arguments)
