"""task=serve_rm: a reward model behind HTTP, for `reward.remote_url` of another run (docs/rewards.md).

POST /get_reward {"query": [text, ...]} -> {"rewards": [number or null, ...], "errors": [null or why, ...]}
GET /health

A text that cannot be scored gets a reason in `errors`, and the others of its request are scored. Nothing more is
computed for a client that hangs up, except for the batch that is under way.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlhf_suite.config.reward import TOKEN
from rlhf_suite.config.runs import ServeRMRun
from rlhf_suite.config.serve import ServeConfig
from rlhf_suite.disk import write_json
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.environment import device_kind
from rlhf_suite.models.reward_model import Judge, score_constants
from rlhf_suite.serving.batcher import Batcher
from rlhf_suite.serving.http_server import LOOPBACK, BadRequest, Guard, listening, make_app, serve

if TYPE_CHECKING:
    from fastapi import FastAPI

PATH = "/get_reward"


def run(config: ServeRMRun, folder: Path) -> dict[str, float]:
    """Serve until a signal; returns how much was scored. `server.json` in the folder says where it listens."""
    reward, limits = config.reward, config.serve
    assert reward.model_name_or_path is not None
    token = os.environ.get(TOKEN) or None
    if limits.host not in LOOPBACK and token is None:
        raise UserError(
            f"serve.host={limits.host} lets other machines in: export {TOKEN}=<secret> here and where the rewards are "
            "asked for, or leave serve.host away"
        )
    constants = score_constants(reward.model_name_or_path, reward.normalize_enable)
    judge = Judge(reward.model_name_or_path, config.ds, device_kind(config.launch), constants)
    try:
        listener = listening(limits.host, limits.port)
    except OSError as error:
        raise UserError(
            f"serve.host={limits.host} serve.port={limits.port}: {error.strerror}. Choose another serve.port, or 0"
        ) from None
    service = Service(judge, limits)
    app = make_app(
        PATH,
        service.answer,
        {"status": "ok", "model": reward.model_name_or_path},
        service.lifespan,
        int(limits.max_request_mb * 2**20),
    )
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"
    write_json(folder / "server.json", {"url": url, "pid": os.getpid()})
    Console().print(f"serving {reward.model_name_or_path} at {url} (end: Ctrl-C)", highlight=False, soft_wrap=True)
    serve(Guard(app, token), listener)
    return {"serve/texts": float(service.batcher.rows), "serve/forwards": float(service.batcher.calls)}


class Service:
    """Requests to scores."""

    def __init__(self, judge: Judge, limits: ServeConfig) -> None:
        self.judge, self.limits = judge, limits
        self.batcher = Batcher(judge.scores, limits.batch_size, limits.max_tokens)
        self.max_characters = limits.max_len * judge.longest_token
        self.tokenising = ThreadPoolExecutor(1, "tokenise")

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """The batcher works as long as the server does."""
        task = asyncio.create_task(self.batcher.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """A score for each text of `query`; a text that cannot be scored gets a reason instead."""
        texts = body.get("query")
        if not isinstance(texts, list):
            raise BadRequest("'query' must be a list of texts")
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                raise BadRequest(f"'query' must be a list of texts; entry {place} is not a text")
        encoded = [await self.encode(text) for text in texts]  # one by one: others may come between
        scores = iter(await self.batcher.submit([ids for ids in encoded if not isinstance(ids, str)]))
        outcomes = [ids if isinstance(ids, str) else finite(next(scores)) for ids in encoded]
        return {
            "rewards": [None if isinstance(each, str) else each for each in outcomes],
            "errors": [each if isinstance(each, str) else None for each in outcomes],
        }

    async def encode(self, text: str) -> list[int] | str:
        """The token ids of a text, or why it cannot be scored. It is never cut: that would be another text."""
        if len(text) > self.max_characters:  # not tokenised: that alone could take a minute
            return f"the text has {len(text)} characters, too many for serve.max_len={self.limits.max_len} tokens"
        try:
            text.encode()
        except UnicodeEncodeError:
            return "the text holds half of a surrogate pair, which is not a character"
        ids = await asyncio.get_running_loop().run_in_executor(self.tokenising, self.judge.encode, text)
        if not ids:
            return "the text is empty"
        if len(ids) > self.limits.max_len:
            return f"the text has {len(ids)} tokens, serve.max_len={self.limits.max_len}"
        return ids


def finite(outcome: float | Exception) -> float | str:
    """A score, or why there is none."""
    if isinstance(outcome, Exception):
        return printable(f"the text could not be scored: {type(outcome).__name__}: {outcome}", 300)
    return outcome if math.isfinite(outcome) else f"the score is {outcome}"
