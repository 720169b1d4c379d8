"""One side of a weight sync through the memory of a GPU, as a process: `python ipc_process.py send|receive PORT`.

Both print a line of JSON for each version of the weights: the digest of every tensor, by its name.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from rlhf_suite.weight_sync import buckets as weight_buckets
from rlhf_suite.weight_sync import sender as weight_sender
from rlhf_suite.weight_sync.cuda_ipc import answer_proof, copy_buckets
from rlhf_suite.weight_sync.digests import digest

VERSIONS = (1, 2)
BUCKET = 1 << 20
# Larger than a bucket, as large as one, several to one, and one whose size is no multiple of the alignment.
SHAPES = {"large": (3, BUCKET // 2), "even": (BUCKET // 2,), "a": (300, 7), "b": (5,), "c": (64, 64), "last": (3, 3)}
LIMIT = timedelta(seconds=60)


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(version)
    return {name: torch.randn(shape, device="cuda", generator=generator) for name, shape in SHAPES.items()}


def send(port: int) -> None:
    weight_buckets.BUCKET_BYTES = BUCKET
    sender = weight_sender.IpcSender(torch.bfloat16, True, "127.0.0.1", port, LIMIT.total_seconds())
    assert sender.connect(2, 1) == ""
    for version in VERSIONS:
        sent = sender.send(version, weights(version).items())
        print(json.dumps({entry.name: entry.digest for entry in sent.entries}), flush=True)


def receive(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    answer_proof(store, 1, 1, 0)
    for version in VERSIONS:
        # All buckets are kept: a copy that shared memory with the bucket would change with the next one.
        kept = list(weight_buckets.join_parts(copy_buckets(store, version, 0)))
        arrived = [pair for entries, tensors in kept for pair in zip(entries, tensors, strict=True)]
        print(json.dumps({entry.name: digest(tensor) for entry, tensor in arrived}), flush=True)


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]](int(sys.argv[2]))
