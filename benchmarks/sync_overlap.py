"""A weight sync over gloo whose buckets overlap, against the same sync in turn: seconds, and the ratio of the two.

Two processes on this machine: one gathers, casts, digests and sends, the other receives, compares digests and copies,
as an engine does. Gathering is modelled as a wait of `--gather-gbs` for the bytes of a tensor, because ranks that hold
its parts are on other nodes and other links. In turn means that a tensor is asked for when the engine has loaded the
buckets before it; everything else is the same code.

Through shared memory (`--channel shm`) the whole file is written before engines load it. Then the seconds of both parts
are measured, and what an overlap of them could give at most: their sum over the longer one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from common import publish
from rlhf_suite.weight_sync.buckets import BUCKET_BYTES, join_parts
from rlhf_suite.weight_sync.digests import WHOLE, as_digests, digest_sums
from rlhf_suite.weight_sync.sender import ShmSender, StreamSender, header_key, make_group, prove_channel
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


def gather(store: dist.Store | None, version: int, count: int, gbs: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in fp32, each after the time that its bytes take; with a store in turn, when all before it are
    loaded."""
    per_bucket, weight = BUCKET_BYTES // (2 * NUMBERS), torch.randn(NUMBERS)
    for number in range(count):
        # The tensor that follows a full bucket is drawn when that bucket is sent.
        if store is not None and number > per_bucket and (number - 1) % per_bucket == 0:
            store.wait([loaded_key(version, (number - 1) // per_bucket - 1)])
        time.sleep(4 * NUMBERS / (gbs * 1e9))
        yield f"w{number}", weight


def sync(sender: StreamSender, version: int, count: int, gbs: float, in_turn: bool) -> float:
    """Return the seconds of a sync, from the first tensor to the last one that the engine has loaded."""
    begin = time.monotonic()
    sender.send(version, gather(sender._store if in_turn else None, version, count, gbs))
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


def load_files(connection: Connection) -> None:
    """Be an engine on the sender's node: load each file whose path and entries arrive, and answer when that is done."""
    torch.set_num_threads(1)
    places: dict[str, torch.Tensor] = {}
    while (sent := connection.recv()) is not None:
        path, entries = sent
        flat = torch.from_file(path, shared=True, size=entries[-1].offset + entries[-1].nbytes, dtype=torch.uint8)
        tensors = [entry.view(flat) for entry in entries]
        assert as_digests([digest_sums(tensor) for tensor in tensors]) == [entry.digest for entry in entries]
        for entry, tensor in zip(entries, tensors, strict=True):
            places.setdefault(entry.name, torch.empty_like(tensor)).copy_(tensor)
        connection.send(None)


def measure_file(mib: int, gbs: float, rounds: int) -> dict[str, Any]:
    """Return the seconds in which a file in shared memory is written and loaded; the first round warms up."""
    torch.set_num_threads(1)
    sender, count = ShmSender(torch.bfloat16, True), (mib << 20) // (2 * NUMBERS)
    here, there = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=load_files, args=(there,))
    engine.start()
    seconds = []
    for version in range(rounds + 1):
        begin = time.monotonic()
        manifest = sender.send(version, gather(None, version, count, gbs))
        written = time.monotonic()
        here.send((manifest.path, manifest.entries))
        here.recv()
        seconds.append((written - begin, time.monotonic() - written))
    here.send(None)
    engine.join(timeout=TIMEOUT_S)
    sender.close()
    written, loaded = (median(times) for times in zip(*seconds[1:], strict=True))
    return {
        "channel": "shm",
        "mib": mib,
        "gather_gbs": gbs,
        "written_s": round(written, 2),
        "loaded_s": round(loaded, 2),
        "largest_ratio": round((written + loaded) / max(written, loaded), 2),
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="MiB of weights in bf16, in buckets of 256")
    parser.add_argument("--gather-gbs", type=float, default=1.0, help="GB/s at which tensors are gathered")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="add the line to results/sync_overlap.jsonl")
    parser.add_argument("--channel", choices=("gloo", "shm"), default="gloo")
    arguments = parser.parse_args()
    measured = measure if arguments.channel == "gloo" else measure_file
    publish("sync_overlap", measured(arguments.mib, arguments.gather_gbs, arguments.rounds), arguments.save)


if __name__ == "__main__":
    main()
