"""Batch the sequences of concurrent requests into one call of the model; meanwhile the next batch is collected.

Clients take turns, and so do the requests of each: a request of thousands of sequences does not make others wait for
all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Score = Callable[[Sequence[list[int]]], list[float]]
Outcome = float | Exception
Item = tuple[list[int], "asyncio.Future[Outcome]"]


class Batcher:
    """Calls `score` with at most `max_rows` sequences and `max_tokens` tokens (one longer sequence goes alone).

    One thread makes all calls, so the memory that the allocator keeps per thread is kept only once.
    """

    def __init__(self, score: Score, max_rows: int, max_tokens: int) -> None:
        self.score, self.max_rows, self.max_tokens = score, max_rows, max_tokens
        self.waiting: dict[str, deque[deque[Item]]] = {}  # requests by client; the first of each is next
        self.has_items = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "batcher")  # no-limit: a second signal ends a server
        self.calls = self.rows = 0

    async def submit(self, sequences: Sequence[list[int]], client: str = "") -> list[Outcome]:
        """Return the score of each sequence, in order, or the exception in the place of one that failed.

        If the caller is cancelled while it waits, its sequences are removed from the queue.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Outcome]] = [loop.create_future() for _ in sequences]
        self.waiting.setdefault(client, deque()).append(deque(zip(sequences, futures, strict=True)))
        self.has_items.set()
        return await asyncio.gather(*futures)

    async def run(self) -> None:
        """Score batches until cancelled."""
        while True:
            await self.has_items.wait()
            batch = self.next_batch()
            if not batch:
                self.has_items.clear()
                continue
            results = await self.outcomes([ids for ids, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    async def outcomes(self, sequences: Sequence[list[int]]) -> list[Outcome]:
        """Score a batch. If that fails, score each sequence alone, so that one failure does not affect the others."""
        loop = asyncio.get_running_loop()
        try:
            scores = await loop.run_in_executor(self.thread, self.score, sequences)
        except Exception as error:
            if len(sequences) == 1:
                return [error]
            return [outcome for ids in sequences for outcome in await self.outcomes([ids])]
        self.calls, self.rows = self.calls + 1, self.rows + len(sequences)
        return [*scores]

    def next_batch(self) -> list[Item]:
        """Return the next batch, a sequence of each client in turn."""
        batch: list[Item] = []
        tokens = 0
        while len(batch) < self.max_rows and (item := self.next_item()) is not None:
            if batch and tokens + len(item[0]) > self.max_tokens:
                break
            batch.append(item)
            tokens += len(item[0])
            self.pass_turn()
        return batch

    def next_item(self) -> Item | None:
        """Return the sequence whose turn it is. Those of clients that have gone are removed."""
        while self.waiting:
            requests = next(iter(self.waiting.values()))
            while requests and requests[0] and requests[0][0][1].done():
                requests[0].popleft()
            if requests and requests[0]:
                return requests[0][0]
            if requests:
                requests.popleft()
            else:
                self.waiting.pop(next(iter(self.waiting)))
        return None

    def pass_turn(self) -> None:
        """Take the sequence whose turn it is. Next is another client, and after it another request of this one."""
        client = next(iter(self.waiting))
        requests = self.waiting.pop(client)
        requests[0].popleft()
        requests.rotate(-1)
        self.waiting[client] = requests
