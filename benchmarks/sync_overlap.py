"""A weight sync over gloo whose buckets overlap, against the same sync in turn: seconds, and the ratio of the two.

Two processes on this machine: one gathers, casts, digests and sends, the other receives, compares digests and copies,
as an engine does. Gathering is modelled as a wait of `--gather-gbs` for the bytes of a tensor, because ranks that hold
its parts are on other nodes and other links. In turn means that a tensor is asked for when the engine has loaded the
buckets before it; everything else is the same code.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from common import publish
from rlhf_suite.weight_sync.buckets import BUCKET_BYTES, join_parts
from rlhf_suite.weight_sync.digests import WHOLE, as_digests, digest_sums
from rlhf_suite.weight_sync.sender import StreamSender, header_key, make_group, prove_channel
from rlhf_suite.weight_sync.stream import receive_buckets

TIMEOUT_S = 300
NUMBERS = 8 << 20  # of a tensor, which has 16 MiB in bf16


def loaded_key(version: int, bucket: int) -> str:
    return f"loaded/{version}/{bucket}"


def receive(port: int, versions: int) -> None:
    """Be the engine: receive so many syncs, compare each digest, and copy each tensor into its place."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group = make_group("gloo", store, 1, 2, timedelta(seconds=TIMEOUT_S))
    prove_channel(group, "gloo", torch.device("cpu"), is_sender=False)
    places: dict[str, torch.Tensor] = {}
    for version in range(versions):
        key = partial(header_key, 0, version, WHOLE)
        buckets = receive_buckets(group, store, key, torch.device("cpu"))
        for bucket, (entries, tensors) in enumerate(join_parts(buckets)):
            assert as_digests([digest_sums(tensor) for tensor in tensors]) == [entry.digest for entry in entries]
            for entry, tensor in zip(entries, tensors, strict=True):
                places.setdefault(entry.name, torch.empty_like(tensor)).copy_(tensor)
            store.set(loaded_key(version, bucket), "1")
        store.set(f"done/{version}", "1")


def gather(
    store: dist.Store, version: int, count: int, gbs: float, in_turn: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in fp32, each after the time that its bytes take; `in_turn`: when all before it are loaded."""
    per_bucket, weight = BUCKET_BYTES // (2 * NUMBERS), torch.randn(NUMBERS)
    for number in range(count):
        # The tensor that follows a full bucket is drawn when that bucket is sent.
        if in_turn and number > per_bucket and (number - 1) % per_bucket == 0:
            store.wait([loaded_key(version, (number - 1) // per_bucket - 1)])
        time.sleep(4 * NUMBERS / (gbs * 1e9))
        yield f"w{number}", weight


def sync(sender: StreamSender, version: int, count: int, gbs: float, in_turn: bool) -> float:
    """Return the seconds of a sync, from the first tensor to the last one that the engine has loaded."""
    begin = time.monotonic()
    sender.send(version, gather(sender._store, version, count, gbs, in_turn))
    sender._store.wait([f"done/{version}"])
    return time.monotonic() - begin


def measure(mib: int, gbs: float, rounds: int) -> dict[str, Any]:
    """Return the seconds of both kinds of sync, taken in turn; the first pair warms up."""
    torch.set_num_threads(1)
    sender = StreamSender("gloo", torch.bfloat16, True, "127.0.0.1", TIMEOUT_S)
    engine = multiprocessing.get_context("spawn").Process(target=receive, args=(sender.port, 2 * rounds + 2))
    engine.start()
    sender.connect(2, 0)
    count = (mib << 20) // (2 * NUMBERS)
    seconds = [
        [sync(sender, 2 * number + kind, count, gbs, in_turn) for kind, in_turn in enumerate((True, False))]
        for number in range(rounds + 1)
    ]
    engine.join(timeout=TIMEOUT_S)
    in_turn, overlapped = (median(times) for times in zip(*seconds[1:], strict=True))
    return {
        "mib": mib,
        "gather_gbs": gbs,
        "in_turn_s": round(in_turn, 2),
        "overlapped_s": round(overlapped, 2),
        "ratio": round(in_turn / overlapped, 2),
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="MiB of weights in bf16, in buckets of 256")
    parser.add_argument("--gather-gbs", type=float, default=1.0, help="GB/s at which tensors are gathered")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="add the line to results/sync_overlap.jsonl")
    arguments = parser.parse_args()
    publish("sync_overlap", measure(arguments.mib, arguments.gather_gbs, arguments.rounds), arguments.save)


if __name__ == "__main__":
    main()
