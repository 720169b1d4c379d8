"""Rewards from HTTP servers.

A request is POST {"query": [...], "prompts": [...], "labels": [...]}, with data.reward_columns also
"columns": {name: [...]}. The answer is {"rewards": [...], "scores"?: [...], "extra_logs"?: {name: [...]}}, where
"rewards" may also be {name: [...]}, named parts. All have one entry per response. `query` is prompt and response with
special tokens.

Several servers share the load, each request going to the next one. A request that fails for a reason that may pass (no
connection, no answer in time, HTTP 408, 425, 429, 5xx) is tried again, at whichever server is next, after 1, 2, 4, ...
seconds, or after those of its header Retry-After. An answer has a largest size (`rewards/http_body.py`); what is
larger, not JSON or not as above fails its rows at once. A server that failed three requests in a row is left out for 10
seconds, each time twice as long. When a request is given up while no server is left, the run ends: nothing would be
gained by going on. With reward.on_error=drop its rows have no score, and so have the others of the batch for as long
as no server is left; they are not waited for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from rlhf_suite.certificates import certificate_problem
from rlhf_suite.config.declarations.reward import TOKEN, HttpConfig, RewardConfig
from rlhf_suite.errors import RunError
from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.base import Choice, Outcome, RewardFailure, Sample, columns_of
from rlhf_suite.rewards.http_body import (
    BASE_BYTES,
    BYTES_PER_ROW,
    BodyError,
    open_client,
    parse_json,
    read_body,
)
from rlhf_suite.rewards.reply import outcomes
from rlhf_suite.rewards.retry import wait_s
from rlhf_suite.waits import waiting

FAILURES_IN_A_ROW, FIRST_BREAK_S, LONGEST_BREAK_S = 3, 10.0, 300.0  # of a server that is left out
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
REFUSED = (401, 403)
QUOTED = 300  # bytes of a server's answer that a message repeats


@dataclass
class Server:
    """One URL and how it has been doing."""

    url: str
    failures: int = 0  # in a row
    out_until: float = 0.0
    last_error: str = ""

    def works(self) -> None:
        self.failures = 0
        self.out_until = 0.0

    def fails(self, reason: str) -> None:
        self.failures += 1
        self.last_error = reason
        if self.failures >= FAILURES_IN_A_ROW:
            breaks = self.failures - FAILURES_IN_A_ROW
            self.out_until = time.monotonic() + min(FIRST_BREAK_S * 2 ** min(breaks, 10), LONGEST_BREAK_S)

    @property
    def is_out(self) -> bool:
        return time.monotonic() < self.out_until


class Servers:
    """Round robin over the servers that work."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Server(url) for url in urls]
        self.turn = 0

    def next(self) -> Server:
        """Return the next server that is not left out; when all are, the one that is due back first."""
        order = [*self.all[self.turn :], *self.all[: self.turn]]
        chosen = next((server for server in order if not server.is_out), min(order, key=lambda s: s.out_until))
        self.turn = (self.all.index(chosen) + 1) % len(self.all)
        return chosen

    @property
    def are_out(self) -> bool:
        return all(server.is_out for server in self.all)

    def check(self, flag: str = "reward.remote_url") -> None:
        """Raise RunError when every server of `flag` is left out."""
        if self.are_out:
            errors = "; ".join(server.last_error for server in self.all)
            raise RunError(f"no server of {flag} answers. {errors}. Start it again, or change {flag}")


class Outage:
    """What becomes of a batch of rows when no server is left: it ends the run, or, where the run `drops` rows without a
    score, costs the rows that are asked about until a server is back."""

    def __init__(self, servers: Servers, drops: bool) -> None:
        self.servers, self.drops = servers, drops
        self.reason = ""  # of the newest one in this batch

    def check(self) -> None:
        """Raise GivenUp if a request of this batch was given up, and no server is back since."""
        if self.reason and self.servers.are_out:
            raise GivenUp(RewardFailure(self.reason, "error"), passing=True)

    def note(self, last: GivenUp, flag: str) -> GivenUp:
        """Return how a request failed whose last try failed by `last`; `flag` names the servers.

        Raises:
            RunError: no server is left, and that ends the run.
        """
        try:
            self.servers.check(flag)
        except RunError as error:
            if not self.drops:
                raise
            self.reason = str(error)
            return GivenUp(replace(last.failure, reason=self.reason), passing=True)
        return last


def drops_rows(config: RewardConfig) -> bool:
    """Return whether a run goes on without the rows that have no score."""
    return config.has("on_error") and config.on_error == "drop"


class GivenUp(Exception):
    """One try that failed; `passing` if another may succeed, `asked` after how many seconds by the server's word."""

    def __init__(self, failure: RewardFailure, passing: bool, asked: str | None = None) -> None:
        super().__init__(failure.reason)
        self.failure, self.passing, self.asked = failure, passing, asked


class RemoteReward:
    """Scores rows at the servers `urls`. `drops`: the run goes on without rows that have no score."""

    def __init__(
        self, urls: Sequence[str], config: HttpConfig, choice: Choice | None = None, *, drops: bool = False
    ) -> None:
        self.config, self.choice, self.drops = config, choice, drops
        self.servers = Servers(urls)

    def score(self, rows: list[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in their order."""
        return asyncio.run(self._score(rows))

    def close(self) -> None:
        """Do nothing: no connection outlives a batch."""

    async def _score(self, rows: list[Sample]) -> list[Outcome]:
        size, places = self.config.batch_size, asyncio.Semaphore(self.config.concurrency)
        outage = Outage(self.servers, self.drops)
        async with open_client(self.config.timeout_s, TOKEN, self.config.concurrency) as client:
            try:
                async with asyncio.TaskGroup() as group:  # the first RunError cancels the other requests
                    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
                    tasks = [group.create_task(self._part(client, places, outage, part)) for part in parts]
            except* RunError as errors:
                raise errors.exceptions[0] from None
        return [outcome for task in tasks for outcome in task.result()]  # no-limit: they are done

    async def _part(
        self, client: httpx.AsyncClient, places: asyncio.Semaphore, outage: Outage, rows: list[Sample]
    ) -> list[Outcome]:
        """Return the outcomes of one request, tried as often as `num_retries` allows."""
        body: dict[str, Any] = {
            "query": [row.query for row in rows],
            "prompts": [row.prompt for row in rows],
            "labels": [row.label for row in rows],
        }
        if columns := columns_of(rows):
            body["columns"] = columns
        request = Request(json.dumps(body).encode(), BASE_BYTES + BYTES_PER_ROW * len(rows), f"{len(rows)} rows")
        async with places:
            try:
                answer, url, retries = await ask(client, outage, self.config, request)
            except GivenUp as error:
                return [error.failure] * len(rows)
        return [replace(outcome, retries=retries) for outcome in outcomes(answer, len(rows), url, self.choice)]


@dataclass(frozen=True)
class Request:
    """A request, which may be sent several times. `token` is the environment variable with the servers' token, and
    `flag` names the servers."""

    content: bytes
    limit: int  # bytes of an answer
    purpose: str  # for the record of waits, such as `32 rows`
    token: str = TOKEN
    flag: str = "reward.remote_url"


async def ask(
    client: httpx.AsyncClient,
    outage: Outage,
    config: HttpConfig,
    request: Request,
    before: Callable[[], None] = lambda: None,
) -> tuple[Any, str, int]:
    """Return the JSON value that a server answers, its URL, and how many tries failed before. Call `before` before
    each try.

    Raises:
        GivenUp: no try succeeded.
        RunError: a server refuses the token, its certificate is not trusted, or all servers are left out and that
            ends the run.
    """
    outage.check()
    asked, servers = None, outage.servers
    for attempt in range(config.num_retries + 1):
        if attempt:
            await asyncio.sleep(wait_s(attempt, asked))
        server = servers.next()
        before()
        try:
            activity = f"{request.purpose} by {server.url}"
            with waiting(activity, limit_s=config.timeout_s, flag="reward.http.timeout_s"):
                answer = await post(client, server.url, config.timeout_s, request)
        except GivenUp as error:
            last, asked = GivenUp(replace(error.failure, retries=attempt), error.passing), error.asked
            if not error.passing:
                break
            server.fails(last.failure.reason)
        else:
            server.works()
            return answer, server.url, attempt
    raise outage.note(last, request.flag)


async def post(client: httpx.AsyncClient, url: str, timeout_s: float, request: Request) -> Any:
    """Return the JSON value that the server at `url` answers.

    Raises:
        GivenUp: there is no such answer.
        RunError: the server refuses the token, or its certificate is not trusted.
    """
    asked = moved = None
    try:
        # a deadline for the whole: httpx's own limits each piece of an answer
        async with asyncio.timeout(timeout_s):
            async with client.stream("POST", url, content=request.content) as response:
                status, is_fine = response.status_code, response.status_code == httpx.codes.OK
                asked, moved = response.headers.get("Retry-After"), response.headers.get("Location")
                content = await read_body(response, request.limit if is_fine else QUOTED, whole=is_fine)
    except (httpx.TimeoutException, TimeoutError):
        reason = f"{url}: no answer within {timeout_s:g} s (reward.http.timeout_s)"
        raise GivenUp(RewardFailure(reason, "timeout"), passing=True) from None
    except BodyError as error:
        raise give_up(f"{url}: {error}", passing=False) from None
    except Exception as error:  # whatever a server makes the client raise is a reward without a score
        raise without_answer(url, error) from None
    if status in REFUSED:
        raise RunError(f"{url}: HTTP {status}. Export the server's token as {request.token}")
    if moved is not None and 300 <= status < 400:
        # The body is not sent to another address than the one that was named.
        raise give_up(f"{url}: HTTP {status}: it moved to {moved}. Write that in {request.flag}", passing=False)
    if not is_fine:
        raise give_up(f"{url}: HTTP {status}: {quote_answer(content)}", passing=status in PASSING, asked=asked)
    try:
        return parse_json(content)
    except BodyError as error:
        raise give_up(f"{url}: {error}: '{quote_answer(content)}'", passing=False) from None


def without_answer(url: str, error: Exception) -> GivenUp | RunError:
    """Return what the error of a client means: a certificate that is not trusted ends the run, others may pass."""
    if problem := certificate_problem(error):
        return RunError(f"{url}: {problem}")
    return give_up(f"{url}: {str(error) or type(error).__name__}", passing=True)


def give_up(reason: str, passing: bool, asked: str | None = None) -> GivenUp:
    """Return the failure of a try for `reason`, which may quote the server, but never the token."""
    return GivenUp(RewardFailure(printable(reason), "error"), passing, asked)


def quote_answer(content: bytes) -> str:
    """Return the beginning of a server's answer, for a message."""
    return printable(content[:QUOTED].decode(errors="replace").strip())
