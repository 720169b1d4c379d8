"""How much memory a function takes: the most that its tensors and arrays held at one time, without a look at the clock
or at what else the process holds."""

from __future__ import annotations

import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tensors(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation returns, once for all views of it, until the last is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.views: Counter[int] = Counter()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.add(each)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if not self.views[place]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self.views[place] += 1
        weakref.finalize(tensor, self.drop, place, size)

    def drop(self, place: int, size: int) -> None:
        self.views[place] -= 1
        if not self.views[place]:
            self.now -= size


def peak_bytes(function: Callable[[], object]) -> int:
    """The peak of its tensors plus that of its arrays and Python objects, in bytes: an upper bound, since a tensor
    that is a view of an array counts twice. It runs twice: the first time it imports what it needs."""
    with Tensors():
        function()
    tracemalloc.start()
    try:
        with Tensors() as tensors:
            function()
        return tensors.peak + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
