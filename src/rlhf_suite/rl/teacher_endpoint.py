"""A teacher behind HTTP: log-probs of given tokens from servers with vLLM's /v1/completions.

A request is POST <url>/completions {"prompt": [[ids], ...], "max_tokens": 1, "prompt_logprobs": 0, ...}. Of each
prompt the answer has `prompt_logprobs`, a list with an entry per token: null for the first one, else {id: {"logprob":
...}}, so that each number is known to be that of the token that was asked about. Texts are never sent.

A request that fails for a reason that may pass is tried again, at whichever server is next. What cannot be had, or is
no log-prob, ends the run with the reason: no token is trained on without what its teacher says of it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from rlhf_suite.background import in_background
from rlhf_suite.certificates import certificate_problem
from rlhf_suite.config.declarations.reward import HttpConfig, urls
from rlhf_suite.config.declarations.teacher import TOKEN
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.models.load import Tokenizer
from rlhf_suite.rewards.http_body import (
    BodyError,
    open_client,
    parse_json,
    read_body,
)
from rlhf_suite.rewards.remote import PASSING, QUOTED, REFUSED, Servers
from rlhf_suite.rewards.retry import wait_s
from rlhf_suite.rl.sharding import ForwardBatch
from rlhf_suite.waits import result, waiting

BYTES_PER_TOKEN, BASE_BYTES = 1 << 10, 1 << 20  # of an answer; a token takes about a hundred
NAME = "teacher"  # of the thread
PATH, TOKENIZE = "/completions", "/tokenize"
PROBE = "Hello, wörld! 12+30=42\n\tdef f(x): return x  # 你好"  # where vocabularies differ they split it otherwise
LOWEST = 1e-3  # how far above 0 a log-prob may be, by rounding


class Failed(Exception):
    """One try that failed; `passing` if another may succeed."""

    def __init__(self, reason: str, passing: bool) -> None:
        super().__init__(printable(reason))
        self.passing = passing


@dataclass(frozen=True)
class Requested:
    """The log-probs of a batch that were asked for in a thread."""

    future: Future[torch.Tensor]
    activity: str

    def result(self) -> torch.Tensor:
        """Wait for the servers, and return the log-probs of all tokens, [T]; 0 of the first one of each sequence."""
        return result(self.future, self.activity, NAME)


class Endpoint:
    """The servers of a teacher. `flag` names them in errors."""

    def __init__(self, flag: str, remote_url: str, config: HttpConfig) -> None:
        self.flag, self.config = flag, config
        self.servers = Servers([url.rstrip("/") for url in urls(remote_url)])

    def log_probs(self, batch: ForwardBatch, temperature: float) -> Requested:
        """Start to ask for the log-probs of a batch."""
        assert temperature == 1, "checked with the flags"
        sequences = [ids.tolist() for ids in batch.tokens.ids.split(batch.tokens.lengths.tolist())]
        activity = f"log-probs of {len(sequences)} responses by {self.flag}"
        return Requested(in_background(NAME, lambda: asyncio.run(self.score(sequences))), activity)

    async def score(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the log-probs of all tokens of `sequences` laid end to end, [T]."""
        size, places = self.config.batch_size, asyncio.Semaphore(self.config.concurrency)
        async with open_client(self.config.timeout_s, TOKEN, self.config.concurrency) as client:
            try:
                async with asyncio.TaskGroup() as group:  # the first error cancels the other requests
                    parts = [sequences[i : i + size] for i in range(0, len(sequences), size)]
                    tasks = [group.create_task(self.part(client, places, part)) for part in parts]
            except* RunError as errors:
                raise errors.exceptions[0] from None
        return torch.tensor([value for task in tasks for row in task.result() for value in row])  # no-limit: done

    async def part(
        self, client: httpx.AsyncClient, places: asyncio.Semaphore, sequences: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return the log-probs of the sequences of one request, tried as often as the flags say."""
        settings = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "add_special_tokens": False}
        body = {"prompt": sequences, **settings}
        limit = BASE_BYTES + BYTES_PER_TOKEN * sum(map(len, sequences))
        async with places:
            return read_scores(await self.ask(client, PATH, body, limit), sequences, self.flag)

    async def ask(self, client: httpx.AsyncClient, path: str, body: dict[str, Any], limit: int) -> Any:
        """Return what a server answers.

        Raises:
            RunError: none answers after all tries, or one refuses the request.
        """
        reason = ""
        for attempt in range(self.config.num_retries + 1):
            if attempt:
                await asyncio.sleep(wait_s(attempt))
            server = self.servers.next()
            url = server.url.removesuffix("/v1") + path if path == TOKENIZE else server.url + path
            try:
                with waiting(f"{self.flag}: {url}", limit_s=self.config.timeout_s, flag="teacher.http.timeout_s"):
                    answer = await self.once(client, url, body, limit)
            except Failed as error:
                reason = str(error)
                if not error.passing:
                    raise self.failure(reason) from None
                server.fails(reason)
            else:
                server.works()
                return answer
        raise self.failure(f"{reason} (after {self.config.num_retries + 1} tries)")

    def failure(self, reason: str) -> RunError:
        """Return the error that ends the run: without its teacher no token has a number to learn from."""
        return RunError(f"{self.flag}: the teacher does not answer. {reason}. Start it again, or correct the address")

    async def once(self, client: httpx.AsyncClient, url: str, body: dict[str, Any], limit: int) -> Any:
        """Return what the server at `url` answers to one request."""
        try:
            async with asyncio.timeout(self.config.timeout_s):  # for the whole: httpx's own limits each piece
                async with client.stream("POST", url, content=json.dumps(body).encode()) as response:
                    status, is_fine = response.status_code, response.status_code == httpx.codes.OK
                    content = await read_body(response, limit if is_fine else QUOTED, whole=is_fine)
            if is_fine:
                return parse_json(content)
        except (httpx.TimeoutException, TimeoutError):
            reason = f"{url}: no answer within {self.config.timeout_s:g} s (teacher.http.timeout_s)"
            raise Failed(reason, passing=True) from None
        except BodyError as error:
            raise Failed(f"{url}: {error}", passing=False) from None
        except httpx.HTTPError as error:
            if problem := certificate_problem(error):
                raise Failed(f"{url}: {problem}", passing=False) from None
            raise Failed(f"{url}: {str(error) or type(error).__name__}", passing=True) from None
        if status in REFUSED:
            raise Failed(f"{url}: HTTP {status}: export the server's token as {TOKEN}", passing=False)
        said = content[:QUOTED].decode(errors="replace").strip()
        raise Failed(f"{url}: HTTP {status}: {said}", passing=status in PASSING)

    def check(self, student: Tokenizer) -> Iterator[str]:
        """Ask how the teacher splits a text, and compare it with the student; yield a notice where it does not say.

        Raises:
            RunError: the teacher does not answer.
            UserError: its tokens are not those of the student.
        """
        ours = student.encode(PROBE, add_special_tokens=False)
        try:
            theirs = result(
                in_background(NAME, lambda: asyncio.run(self.tokenize())), f"the tokens of {self.flag}", NAME
            )
        except Failed:
            yield f"{self.flag}: the teacher does not say how it splits texts, so its vocabulary was not compared"
            return
        if theirs != ours:
            raise UserError(
                f"{self.flag}: its vocabulary is not that of the student: it splits {PROBE!r} into {len(theirs)} "
                f"tokens {theirs[:4]} ..., the student into {len(ours)}, {ours[:4]} ... "
                "Choose a teacher of the same family"
            )

    async def tokenize(self) -> list[int]:
        """Return the tokens of a text by the teacher.

        Raises:
            Failed: the server has no such service.
        """
        body = {"prompt": PROBE, "add_special_tokens": False}
        async with open_client(self.config.timeout_s, TOKEN, self.config.concurrency) as client:
            try:
                answer = await self.ask(client, TOKENIZE, body, BASE_BYTES)
            except RunError as error:
                if "HTTP 404" in str(error):
                    raise Failed(str(error), passing=False) from None
                raise
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            raise Failed("no tokens", passing=False)
        return tokens


def read_scores(answer: Any, sequences: Sequence[Sequence[int]], flag: str) -> list[list[float]]:
    """Return the log-prob of each token of each sequence from the answer of a server; 0 of the first token.

    Raises:
        RunError: it does not have them.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != len(sequences):
        problem = f"the answer does not have one choice for each of the {len(sequences)} prompts"
        raise RunError(f"{flag}: {problem}. Give a server with vLLM's protocol (docs/rl_distillation.md)")
    return [scores_of(choice, ids, flag) for choice, ids in zip(choices, sequences, strict=True)]


def scores_of(choice: Any, ids: Sequence[int], flag: str) -> list[float]:
    """Return the log-probs of the tokens `ids` from one choice."""
    given = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
    if not isinstance(given, list) or len(given) != len(ids):
        problem = "the answer has no prompt_logprobs of each token of the prompt"
        raise RunError(f"{flag}: {problem}. Give a server with vLLM's protocol (docs/rl_distillation.md)")
    scores = [0.0]
    for place, (token, entry) in enumerate(zip(ids[1:], given[1:], strict=True), 1):
        value = entry.get(str(token)) if isinstance(entry, dict) else None
        number = value.get("logprob") if isinstance(value, dict) else None
        if not isinstance(number, int | float) or isinstance(number, bool) or not -math.inf < number < LOWEST:
            said, problem = printable(str(entry)[:QUOTED]), f"no log-prob of token {token} at place {place} of a prompt"
            raise RunError(f"{flag}: the answer has {problem} ({said}). The teacher must have the student's vocabulary")
        scores.append(float(number))
    return scores
