"""A stream of requests to the engines: each gets the next few as soon as it has room, so that none ever runs dry."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import ray

from rlhf_suite.engines.generation import Generation, GenerationRequest
from rlhf_suite.engines.pool import EnginePool

BUNDLE = 16  # requests in one call of an engine; its answers come together
AHEAD = 2  # requests handed to an engine, in multiples of what it runs at once


class Dispatcher:
    """Hands requests to the engines in their order; the answers come as they are ready."""

    def __init__(self, pool: EnginePool, max_num_seqs: int) -> None:
        self.pool, self.limit = pool, AHEAD * max_num_seqs
        self.waiting: deque[GenerationRequest] = deque()
        self.under_way: dict[ray.ObjectRef, int] = {}  # call -> its engine
        self.sizes: dict[ray.ObjectRef, int] = {}
        self.load = [0] * len(pool)  # requests that each engine has

    @property
    def is_hungry(self) -> bool:
        """Whether the engines could take more than they are given."""
        return not self.waiting

    @property
    def is_busy(self) -> bool:
        return bool(self.under_way)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Line requests up behind the others."""
        self.waiting.extend(requests)
        self._feed()

    def collect(self) -> list[Generation]:
        """Waits for answers."""
        result: list[Generation] = []
        for ref, generations in self.pool.done(self.under_way).items():
            self.load[self.under_way.pop(ref)] -= self.sizes.pop(ref)
            result += generations
        self._feed()
        return result

    def _feed(self) -> None:
        while self.waiting:
            engine = self.load.index(min(self.load))
            if self.load[engine] >= self.limit:
                return
            bundle = [self.waiting.popleft() for _ in range(min(BUNDLE, len(self.waiting)))]
            ref = self.pool.begin(engine, bundle)
            self.under_way[ref], self.sizes[ref] = engine, len(bundle)
            self.load[engine] += len(bundle)
