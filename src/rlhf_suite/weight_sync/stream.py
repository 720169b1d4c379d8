"""Buckets of weights on their way between two processes: while one is sent and loaded, the next is made.

The sender packs bucket k + 1 while bucket k is on its way, and announces it at once. The receiver asks for it before it
loads bucket k, if it is announced by then; where making a bucket takes longer than sending one, the receiver loads
meanwhile. Each side holds two buckets, whose bytes travel in the order in which they were made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rlhf_suite.weight_sync.buckets import ALIGNMENT, Bucket
from rlhf_suite.weight_sync.digests import TensorEntry, entries_from_plain

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend


def start_broadcast(group: Backend, flat: torch.Tensor) -> dist.Work:
    """Begin to send `flat` of rank 0 into `flat` of the other ranks, and return what can be waited for."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([flat], options)  # type: ignore[attr-defined]  # torch's stubs lack it


def broadcast(group: Backend, flat: torch.Tensor) -> None:
    """Send `flat` of rank 0 into `flat` of the other ranks."""
    start_broadcast(group, flat).wait()


def send_buckets(
    group: Backend, buckets: Iterable[Bucket], device: torch.device, announce: Callable[[list[TensorEntry]], None]
) -> Iterator[Bucket]:
    """Announce and send one bucket after the other, and yield each when it is on its way. The next one is made before
    this one has arrived."""
    under_way: dist.Work | None = None
    for entries, flat in buckets:
        announce(entries)
        placed = flat.to(device)
        if under_way is not None:
            under_way.wait()
        under_way = start_broadcast(group, placed)
        yield entries, placed
    if under_way is not None:
        under_way.wait()
    announce([])


def receive_buckets(
    group: Backend, store: dist.Store, key: Callable[[int], str], device: torch.device
) -> Iterator[Bucket]:
    """Yield buckets as they arrive; `key` names the description of each in the store. The next one is on its way while
    the caller works on this one, if it is announced."""

    def begin(number: int) -> tuple[list[TensorEntry], torch.Tensor, dist.Work] | None:
        entries = entries_from_plain(json.loads(store.get(key(number))))
        if not entries:
            return None
        size = -(-(entries[-1].offset + entries[-1].nbytes) // ALIGNMENT) * ALIGNMENT
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        return entries, flat, start_broadcast(group, flat)

    number, coming = 0, begin(0)
    while coming is not None:
        entries, flat, under_way = coming
        under_way.wait()
        number += 1
        is_announced = store.check([key(number)])
        coming = begin(number) if is_announced else None
        yield entries, flat
        if not is_announced:
            coming = begin(number)
