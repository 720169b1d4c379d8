"""Batch the sequences of concurrent requests into one call of the model; meanwhile the next batch is collected."""

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
        self.waiting: deque[Item] = deque()
        self.has_items = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "batcher")  # no-limit: a second signal ends a server
        self.calls = self.rows = 0

    async def submit(self, sequences: Sequence[list[int]]) -> list[Outcome]:
        """Return the score of each sequence, in order, or the exception in the place of one that failed.

        If the caller is cancelled while it waits, its sequences are removed from the queue.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Outcome]] = [loop.create_future() for _ in sequences]
        self.waiting.extend(zip(sequences, futures, strict=True))
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
            found = await loop.run_in_executor(self.thread, self.score, sequences)
        except Exception as error:
            if len(sequences) == 1:
                return [error]
            return [outcome for ids in sequences for outcome in await self.outcomes([ids])]
        self.calls, self.rows = self.calls + 1, self.rows + len(sequences)
        return [*found]

    def next_batch(self) -> list[Item]:
        """Return the next batch in order of arrival, without the sequences of clients that have gone."""
        batch: list[Item] = []
        tokens = 0
        while self.waiting and len(batch) < self.max_rows:
            ids, future = self.waiting[0]
            if not future.done():
                if batch and tokens + len(ids) > self.max_tokens:
                    break
                batch.append((ids, future))
                tokens += len(ids)
            self.waiting.popleft()
        return batch
