"""The route of a served reward model: texts in, scores out (docs/rewards_servers.md).

POST /get_reward {"query": [text, ...]} -> {"rewards": [number or null, ...], "errors": [null or reason, ...]}

A text that cannot be scored gets a reason in `errors`, and the other texts of its request are scored. Nothing more is
computed for a client that closes its connection, except for the batch that is under way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_suite.config.declarations.tools import LONGEST, ServeConfig
from rlhf_suite.data.row import RowError
from rlhf_suite.foreign_text import printable
from rlhf_suite.serving.batcher import Batcher
from rlhf_suite.serving.http_server import BadRequest

if TYPE_CHECKING:
    from fastapi import FastAPI

PATH = "/get_reward"


class TextModel(Protocol):
    """A reward model, as its service sees it."""

    @property
    def positions(self) -> int | None:
        """Return how many tokens the model was made for; None if it is not known."""
        ...

    @property
    def longest_token(self) -> int:
        """Return the number of characters of the longest token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def scores(self, sequences: Sequence[list[int]]) -> list[float]:
        """Return one score per sequence of token ids."""
        ...


class RewardService:
    """Answers requests with the scores of a reward model, within the limits of `serve`."""

    def __init__(self, model: TextModel, limits: ServeConfig) -> None:
        self.model, self.limits = model, limits
        self.batcher = Batcher(model.scores, limits.batch_size, limits.max_tokens)
        self.max_len = limits.max_len or min(LONGEST, model.positions or LONGEST)
        self.max_characters = self.max_len * model.longest_token
        self.tokenising = ThreadPoolExecutor(1, "tokenise")  # no-limit: a second signal ends a server

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the batcher as long as the server runs."""
        task = asyncio.create_task(self.batcher.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def answer(self, body: dict[str, Any], client: str = "") -> dict[str, Any]:
        """Return a score for each text of `query`, or the reason why a text has none. Clients take turns.

        Raises:
            BadRequest: `query` is not a list of texts.
        """
        texts = body.get("query")
        if not isinstance(texts, list):
            raise BadRequest("'query' must be a list of texts")
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                raise BadRequest(f"'query' must be a list of texts; entry {place} is not a text")
        encoded = [await self.encode(text) for text in texts]  # one by one: other requests may come between
        scores = iter(await self.batcher.submit([ids for ids in encoded if not isinstance(ids, str)], client))
        outcomes = [ids if isinstance(ids, str) else finite(next(scores)) for ids in encoded]
        return {
            "rewards": [None if isinstance(outcome, str) else outcome for outcome in outcomes],
            "errors": [outcome if isinstance(outcome, str) else None for outcome in outcomes],
        }

    async def encode(self, text: str) -> list[int] | str:
        """Return the token ids of a text, or why it cannot be scored. A text is never cut: the score would be wrong."""
        if len(text) > self.max_characters:  # not even tokenised, which could take a minute
            return f"the text has {len(text)} characters, too many for serve.max_len={self.max_len} tokens"
        try:
            text.encode()
        except UnicodeEncodeError:
            return "the text holds half of a surrogate pair, which is not a character"
        try:
            ids = await asyncio.get_running_loop().run_in_executor(self.tokenising, self.model.encode, text)
        except RowError as error:
            return error.reason
        if not ids:
            return "the text is empty"
        if len(ids) > self.max_len:
            return f"the text has {len(ids)} tokens, serve.max_len={self.max_len}"
        return ids


def finite(outcome: float | Exception) -> float | str:
    """Return a score, or why there is none."""
    if isinstance(outcome, Exception):
        return printable(f"the text could not be scored: {type(outcome).__name__}: {outcome}", 300)
    return outcome if math.isfinite(outcome) else f"the score is {outcome}"
