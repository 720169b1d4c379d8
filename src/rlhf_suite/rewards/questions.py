"""The questions to a judge about samples, by reward.judge.mode: what is asked, how the reply is read, and the scores
that follow from it.

verdict: a question for each sample, which is answered by a number for each criterion (`rewards/rubric.py`).
yes_no: a question for each sample; the score is the probability of Yes as the first token of the reply, among Yes and
No (`rewards/yes_no.py`), which is the expectation of the verdict (Zhang et al. 2024, Generative Verifiers,
arXiv:2408.15240, section 3).
rank: a question for all answers to a prompt, which is answered by their order (`rewards/ranking.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rlhf_suite.config.declarations.reward import JudgeConfig
from rlhf_suite.rewards import ranking
from rlhf_suite.rewards.base import Sample
from rlhf_suite.rewards.judge_model import Messages, Reply
from rlhf_suite.rewards.rubric import ONLY, Form, NoVerdict, Rubric, messages, read_verdict, yes_no_messages

NONCE = 16  # characters of the number of a request
Parts = Mapping[str, float]  # what a judge says, by criterion or by answer


@dataclass(frozen=True)
class Question:
    """What a judge is asked. `messages` makes the conversation with the number of the request, and `read` reads the
    reply with it, or raises `NoVerdict`."""

    key: str  # is equal only for equal questions
    messages: Callable[[str], Messages]
    read: Callable[[Reply, str], Parts]


@dataclass(frozen=True)
class Subject:
    """Samples that are asked about together: their places in a batch, the questions, and how each sample's parts follow
    from what is said to all of these."""

    places: Sequence[int]
    questions: Sequence[Question]
    parts: Callable[[Sequence[Parts]], Sequence[Parts]]


def number_of(key: str, asked: int, seed: int) -> str:
    """Return the number of a request with the question `key`, which was asked so often before in a run of this seed.

    It is a digest of the question, so equal runs ask equally. No response can hold it, since that would be a digest of
    itself.
    """
    return hashlib.sha256(f"{seed} {key} {asked}".encode()).hexdigest()[:NONCE]


class Questioner:
    """Makes the questions about batches of samples. `about`: all that replies depend on beside the samples."""

    def __init__(self, rubric: Rubric, config: JudgeConfig, about: Mapping[str, Any], seed: int) -> None:
        self.rubric, self.config, self.seed = rubric, config, seed
        low, high = config.scale
        self.form = Form(low, high, config.max_chars)
        others = {} if config.mode == "verdict" else {"mode": config.mode}
        given = {**about, "form": asdict(self.form), "longest": config.max_new_tokens, "rubric": rubric.text, **others}
        self.about = json.dumps(given, sort_keys=True)

    def key(self, *content: Any) -> str:
        """Return the name of a question, by all that determines it but the number of the request."""
        return hashlib.sha256(json.dumps([self.about, *content]).encode()).hexdigest()

    def value(self, parts: Parts) -> float:
        """Return the reward of a sample from its parts."""
        return self.rubric.value(parts) if self.config.mode == "verdict" else parts[ONLY]

    def subjects(self, samples: Sequence[Sample]) -> Iterator[Subject]:
        """Yield the questions about a batch."""
        if self.config.mode != "rank":
            for place, sample in enumerate(samples):
                yield Subject([place], [self.about_one(sample)], list)
            return
        groups: dict[Hashable, list[int]] = {}
        for place, sample in enumerate(samples):
            groups.setdefault(("", sample.prompt) if sample.group is None else sample.group, []).append(place)
        for places in groups.values():
            yield self.about_group(places, [samples[place] for place in places])

    def about_one(self, sample: Sample) -> Question:
        """Return the question about one sample."""
        key = self.key(sample.prompt, sample.response, sample.label)
        if self.config.mode == "yes_no":
            return Question(key, partial(yes_no_messages, self.rubric, sample, self.form), read_probability)
        return Question(key, partial(messages, self.rubric, sample, self.form), self.read_verdict)

    def read_verdict(self, reply: Reply, nonce: str) -> Parts:
        """Return the number of each criterion."""
        return read_verdict(reply.text, self.rubric, self.form, nonce)

    def about_group(self, places: Sequence[int], samples: Sequence[Sample]) -> Subject:
        """Return the questions about the answers to one prompt: equal ones are one answer, and one alone needs none."""
        shown = ranking.shuffle(samples, self.seed)
        if len(shown) == 1:
            return Subject(places, [], lambda _: [{ONLY: ranking.ALONE}] * len(places))
        orders = [shown, shown[::-1]] if self.config.both_orders else [shown]
        questions = [
            Question(
                self.key(samples[0].prompt, order, samples[0].label),
                partial(ranking.messages, self.rubric, samples[0], order, self.form),
                partial(read_order, len(order)),
            )
            for order in orders
        ]
        responses = [sample.response for sample in samples]
        return Subject(places, questions, partial(ranking.scores, orders, responses))


def read_order(count: int, reply: Reply, nonce: str) -> Parts:
    """Return the score of each answer by its number."""
    return ranking.read_ranking(reply.text, count, nonce)


def read_probability(reply: Reply, nonce: str) -> Parts:
    """Return the probability of Yes."""
    if reply.probability is None:
        raise NoVerdict("the reply has no probability")
    return {ONLY: reply.probability}
