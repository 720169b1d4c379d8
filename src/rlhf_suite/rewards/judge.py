"""Rewards from a judge: a chat model behind an OpenAI-compatible server scores each response by a rubric.

A request is POST <reward.judge.url>/chat/completions {"model": ..., "messages": [...], "max_tokens": ...} with the
fields of reward.judge.body. The reward of a response is the weighted mean of the rubric's criteria, each from 0 to 1,
and every criterion is a number of the sample. What is not exactly one verdict in the form that was asked for
(`rewards/rubric.py`) is no verdict, which fails the sample and is never a number.

Requests are retried as those to reward servers are. A question is asked once: verdicts are kept in the run folder
(`rewards/judge_calls.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from rlhf_suite.config.declarations.reward import HttpConfig, JudgeConfig, urls
from rlhf_suite.errors import RunError
from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.base import Choice, NoSuchPart, Outcome, RewardFailure, Sample
from rlhf_suite.rewards.http_body import BASE_BYTES, open_client
from rlhf_suite.rewards.judge_calls import REPLY, Call, Counts, JudgeCalls
from rlhf_suite.rewards.remote import GivenUp, Request, Servers, ask
from rlhf_suite.rewards.rubric import Form, NoVerdict, messages, read_rubric, read_verdict

PATH = "/chat/completions"
BYTES_PER_TOKEN = 64  # of an answer: reasoning and its JSON escapes are longer than a token's text
CHARS_PER_TOKEN = 4  # where a server does not say how many tokens it used
MAX_TOKENS = 1 << 40  # no honest server says more


@dataclass(frozen=True)
class Reply:
    """What a judge wrote, and what it cost."""

    text: str
    tokens: int
    problem: str = ""  # why it cannot hold a verdict


class JudgeReward:
    """Scores samples by the rubric in a file."""

    def __init__(
        self, rubric: Path, config: JudgeConfig, http: HttpConfig, calls: JudgeCalls, choice: Choice | None = None
    ) -> None:
        self.rubric, self.config, self.http = read_rubric(rubric.read_text(encoding="utf-8")), config, http
        self.calls, self.choice, self.counts = calls, choice or Choice(), Counts()
        self.form = Form(config.scale[0], config.scale[1], config.max_chars)
        self.servers = Servers([url.rstrip("/").removesuffix(PATH) + PATH for url in urls(config.url)])
        about = {
            "model": config.model,
            "body": config.body,
            "form": asdict(self.form),
            "longest": config.max_new_tokens,
        }
        self.about = json.dumps(about | {"rubric": self.rubric.text}, sort_keys=True)

    def close(self) -> None:
        """Do nothing: no connection outlives a batch."""

    def score(self, rows: list[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in their order. Equal samples are one question."""
        keys = [self.key(row) for row in rows]
        asked = {key: row for key, row in zip(keys, rows, strict=True) if self.calls.find(key) is None}
        known = {key: self.make_outcome(parts) for key in {*keys} if (parts := self.calls.find(key)) is not None}
        if asked:
            known |= asyncio.run(self.ask_all(asked))
        outcomes = [known[key] for key in keys]
        failed = sum(isinstance(outcome, RewardFailure) for outcome in outcomes)
        self.counts.add(answers=len(rows), cached=len(rows) - len(asked), no_verdict=failed)
        return outcomes

    def key(self, sample: Sample) -> str:
        """Return the name of the question about a sample, by all that determines it but the number of its quotation."""
        content = json.dumps([self.about, sample.prompt, sample.response, sample.label])
        return hashlib.sha256(content.encode()).hexdigest()

    def make_outcome(self, parts: Mapping[str, float]) -> Outcome:
        """Return the outcome of a sample with a verdict."""
        value = self.rubric.value(parts)
        try:
            return self.choice.make_scored(value, value, parts)
        except NoSuchPart as error:
            return RewardFailure(str(error), "error")

    async def ask_all(self, asked: Mapping[str, Sample]) -> dict[str, Outcome]:
        """Return the outcome of each question. Before an error ends the run, those under way are answered, since they
        are paid for; no other is asked."""
        places, errors = asyncio.Semaphore(self.http.concurrency), list[RunError]()

        async def answer(row: Sample, key: str) -> Outcome:
            async with places:
                if errors:
                    return RewardFailure(str(errors[0]), "error")
                try:
                    return await self.judge(client, key, row)
                except RunError as error:
                    errors.append(error)
                    return RewardFailure(str(error), "error")

        async with open_client(self.http.timeout_s, self.config.key_env, self.http.concurrency) as client:
            outcomes = await asyncio.gather(*(answer(row, key) for key, row in asked.items()))
        if errors:
            raise errors[0]
        return dict(zip(asked, outcomes, strict=True))

    async def judge(self, client: httpx.AsyncClient, key: str, sample: Sample) -> Outcome:
        """Return what the judge says of a sample, and keep it.

        Raises:
            RunError: the budget is used up, the server refuses the key, or no server is left.
        """
        nonce, began, tries = secrets.token_hex(6), time.perf_counter(), 0

        def begin() -> None:
            nonlocal tries
            self.calls.begin()
            tries += 1

        asked, call = messages(self.rubric, sample, self.form, nonce), Call(key)
        try:
            answer, _, retries = await ask(client, self.servers, self.http, self.request(asked), begin)
            reply = read_reply(answer, sum(len(message["content"]) for message in asked))
            call = replace(call, reply=reply.text[-REPLY:], tokens=reply.tokens)
            call = replace(call, parts=self.read_parts(reply, nonce))
            outcome = self.make_outcome(call.parts or {})
        except GivenUp as error:
            outcome, retries = error.failure, error.failure.retries
        except NoVerdict as error:
            outcome = RewardFailure(f"the judge gives no verdict: {error}", "error")
        finally:
            seconds = time.perf_counter() - began
            self.counts.add(calls=tries, tokens=call.tokens, seconds=seconds)
            if tries:
                self.calls.end(replace(call, tries=tries, seconds=seconds))
        return replace(outcome, retries=retries)

    def request(self, asked: Sequence[Mapping[str, str]]) -> Request:
        """Return the request with a conversation. Fields of reward.judge.body stand in place of those of the suite, and
        one that is null is not sent."""
        config = self.config
        fields = {"model": config.model, "messages": asked, "max_tokens": config.max_new_tokens, **config.body}
        content = json.dumps({name: value for name, value in fields.items() if value is not None})
        limit = BASE_BYTES + BYTES_PER_TOKEN * config.max_new_tokens
        return Request(content.encode(), limit, "a verdict", config.key_env, "reward.judge.url")

    def read_parts(self, reply: Reply, nonce: str) -> dict[str, float]:
        """Return the verdict of a reply; NoVerdict says why there is none."""
        if reply.problem:
            raise NoVerdict(reply.problem)
        return read_verdict(reply.text, self.rubric, self.form, nonce)


def read_reply(answer: Any, asked_chars: int) -> Reply:
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
        return Reply("", tokens, f"the answer has no message: '{printable(json.dumps(answer), 100)}'")
    is_cut = choice.get("finish_reason") == "length"
    return Reply(text, tokens, "the reply was cut off (reward.judge.max_new_tokens)" if is_cut else "")
