"""The chat model of a judge: who is asked, and what it replies. A run asks servers with OpenAI's protocol, or engines
of its own (`rl/judge_engines.py`).

A request to a server is POST <reward.judge.url>/chat/completions {"model": ..., "messages": [...], "max_tokens": ...}
with the fields of reward.judge.body. Requests are retried as those to reward servers are. Where Yes or No is asked for,
the request is for one token with the log-probabilities of the most likely ones (`rewards/yes_no.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import httpx

from rlhf_suite.config.declarations.reward import HttpConfig, JudgeConfig, urls
from rlhf_suite.errors import RunError
from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.http_body import BASE_BYTES, open_client
from rlhf_suite.rewards.remote import GivenUp, Outage, Request, Servers, ask
from rlhf_suite.rewards.rubric import NoVerdict
from rlhf_suite.rewards.yes_no import ASKED, find_first_token, read_first_token

PATH = "/chat/completions"
BYTES_PER_TOKEN = 64  # of an answer: reasoning and its JSON escapes are longer than a token's text
CHARS_PER_TOKEN = 4  # where a server does not say how many tokens it used
MAX_TOKENS = 1 << 40  # no honest server says more
CUT_OFF = "the reply was cut off (reward.judge.max_new_tokens)"
REFUSES_LOG_PROBS = re.compile(r": HTTP 4\d\d: .*logprobs", re.DOTALL)
READS_LOG_PROBS = (
    "reward.judge.mode=yes_no reads them. Write reward.judge.mode=verdict, name a server that gives logprobs and "
    "top_logprobs in reward.judge.url, or ask for fewer by 'reward.judge.body={top_logprobs: 5}'"
)

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Reply:
    """What a judge wrote, and what it cost."""

    text: str
    tokens: int
    problem: str = ""  # why it cannot hold a verdict
    retries: int = 0
    probability: float | None = None  # of Yes, where Yes or No was asked for
    ends_run: str = ""  # why no reply of this server could hold a verdict


# Asks one question, and calls its second argument before each try. It raises `GivenUp` where no try succeeds, and
# RunError where the run cannot go on.
Ask = Callable[[Messages, Callable[[], None]], Awaitable[Reply]]


class JudgeModel(Protocol):
    """A chat model that may be asked."""

    about: Mapping[str, Any]  # all of it that replies depend on
    concurrency: int  # questions at a time

    def open(self) -> AbstractAsyncContextManager[Ask]:
        """Connect for a batch of questions."""
        ...


class JudgeServers:
    """A chat model behind servers. `drops`: the run goes on without rows that have no score."""

    def __init__(self, config: JudgeConfig, http: HttpConfig, *, drops: bool = False) -> None:
        self.config, self.http, self.drops = config, http, drops
        self.about: Mapping[str, Any] = {"model": config.model, "body": config.body}
        self.concurrency = http.concurrency
        self.is_yes_no = config.mode == "yes_no"
        self.gave_log_probs = set[str]()  # the servers that did
        self.servers = Servers([address_of(url) for url in urls(config.url)])

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Ask]:
        """Open the connections of a batch."""
        outage = Outage(self.servers, self.drops)
        async with open_client(self.http.timeout_s, self.config.key_env, self.http.concurrency) as client:
            yield partial(self.ask, client, outage)

    async def ask(
        self, client: httpx.AsyncClient, outage: Outage, messages: Messages, begin: Callable[[], None]
    ) -> Reply:
        """Return the reply of a server."""
        try:
            answer, url, retries = await ask(client, outage, self.http, self.request(messages), begin)
        except GivenUp as error:
            reason = error.failure.reason
            if self.is_yes_no and not self.gave_log_probs and REFUSES_LOG_PROBS.search(reason):
                raise RunError(f"{reason}. It lists no log-probabilities, and {READS_LOG_PROBS}") from None
            raise
        reply = read_reply(answer, sum(len(message["content"]) for message in messages), retries)
        return self.read_words(reply, answer, url) if self.is_yes_no and reply.problem in ("", CUT_OFF) else reply

    def read_words(self, reply: Reply, answer: Any, url: str) -> Reply:
        """Return the reply with the probability of Yes, or why it has none. It is cut off at its first token."""
        reply = replace(reply, problem="")
        first = find_first_token(answer["choices"][0])
        if first is None and url not in self.gave_log_probs:
            return replace(reply, ends_run=f"{url} lists no log-probabilities, and {READS_LOG_PROBS}")
        if first is None:
            return replace(reply, problem="the answer lists no log-probabilities")
        self.gave_log_probs.add(url)
        try:
            return replace(reply, probability=read_first_token(first))
        except NoVerdict as error:
            return replace(reply, problem=str(error))

    def request(self, messages: Messages) -> Request:
        """Return the request with a conversation. Fields of reward.judge.body stand in place of those of the suite, and
        one that is null is not sent."""
        config = self.config
        length = ASKED if self.is_yes_no else {"max_tokens": config.max_new_tokens}
        fields = {"model": config.model, "messages": messages, **length, **config.body}
        content = json.dumps({name: value for name, value in fields.items() if value is not None})
        limit = BASE_BYTES + BYTES_PER_TOKEN * config.max_new_tokens
        return Request(content.encode(), limit, "a verdict", config.key_env, "reward.judge.url")


def address_of(url: str) -> str:
    """Return the address of a server's chat completions; `url` may name it already, and may have a query."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/").removesuffix(PATH) + PATH, fragment=""))


def read_reply(answer: Any, asked_chars: int, retries: int = 0) -> Reply:
    """Return the one message in a server's answer. Where the server does not say how many tokens it used, they are
    estimated from the characters of question and reply."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    message = choice.get("message") if isinstance(choice, dict) else None
    text = message.get("content") if isinstance(message, dict) else None
    usage = answer.get("usage") if isinstance(answer, dict) else None
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens < MAX_TOKENS:
        tokens = (asked_chars + len(text if isinstance(text, str) else "")) // CHARS_PER_TOKEN
    if not isinstance(choice, dict) or not isinstance(text, str):
        problem = f"the answer has no message: '{printable(json.dumps(answer), 100)}'"
        return Reply("", tokens, problem, retries)
    return Reply(text, tokens, CUT_OFF if choice.get("finish_reason") == "length" else "", retries)
