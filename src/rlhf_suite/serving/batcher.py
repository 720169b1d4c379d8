"""Joins what concurrent requests ask of a model into one call: while it computes, the next batch gathers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Score = Callable[[Sequence[list[int]]], list[float]]
Outcome = float | Exception
Item = tuple[list[int], "asyncio.Future[Outcome]"]


class Batcher:
    """Calls `score` with at most `max_rows` sequences and, unless one alone has more, `max_tokens` tokens.

    All calls are made in one thread: what its memory allocator has freed is used again, and not kept once per thread.
    """

    def __init__(self, score: Score, max_rows: int, max_tokens: int) -> None:
        self.score, self.max_rows, self.max_tokens = score, max_rows, max_tokens
        self.waiting: deque[Item] = deque()
        self.news = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "batcher")
        self.calls = self.rows = 0

    async def submit(self, sequences: Sequence[list[int]]) -> list[Outcome]:
        """Return their scores, in order; in the place of one that could not be computed, the exception.

        Whoever is cancelled while waiting has his sequences taken from the queue.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Outcome]] = [loop.create_future() for _ in sequences]
        self.waiting.extend(zip(sequences, futures, strict=True))
        self.news.set()
        return await asyncio.gather(*futures)

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await self.news.wait()
            batch = self.take()
            if not batch:
                self.news.clear()
                continue
            results = await self.outcomes([ids for ids, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

    async def outcomes(self, sequences: Sequence[list[int]]) -> list[Outcome]:
        """Score a batch; where that fails, each sequence alone, so that one fails none of the others."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self.thread, self.score, sequences)
        except Exception as error:
            if len(sequences) == 1:
                return [error]
            return [outcome for ids in sequences for outcome in await self.outcomes([ids])]
        self.calls, self.rows = self.calls + 1, self.rows + len(sequences)
        return [*found]

    def take(self) -> list[Item]:
        """The next batch, in order of arrival; those who hung up are passed over."""
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
