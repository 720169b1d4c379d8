"""Joins what concurrent requests ask of a model into one call: while it computes, the next batch gathers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

Score = Callable[[Sequence[list[int]]], list[float]]
Item = tuple[list[int], "asyncio.Future[float]"]


class Batcher:
    """Calls `score` with at most `max_rows` sequences and, unless one alone has more, `max_tokens` tokens."""

    def __init__(self, score: Score, max_rows: int, max_tokens: int) -> None:
        self.score, self.max_rows, self.max_tokens = score, max_rows, max_tokens
        self.waiting: deque[Item] = deque()
        self.news = asyncio.Event()
        self.calls = self.rows = 0

    async def submit(self, sequences: Sequence[list[int]]) -> list[float]:
        """Their scores, in order."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[float]] = [loop.create_future() for _ in sequences]
        self.waiting.extend(zip(sequences, futures, strict=True))
        self.news.set()
        return await asyncio.gather(*futures)

    async def run(self) -> None:
        """Serve until cancelled. What `score` raises goes to those whose sequences were in the call."""
        while True:
            await self.news.wait()
            batch = self.take()
            if not batch:
                self.news.clear()
                continue
            try:
                results = await asyncio.to_thread(self.score, [ids for ids, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
                continue
            self.calls, self.rows = self.calls + 1, self.rows + len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)

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
