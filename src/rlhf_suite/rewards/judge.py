"""Rewards from a judge: a chat model scores responses by a rubric.

What is asked, and the reward that follows from the reply, are in `rewards/questions.py`; who is asked, in
`rewards/judge_model.py`. The reward of a response is the weighted mean of the rubric's criteria, each from 0 to 1, and
every criterion is a number of the sample. What is not exactly one verdict in the form that was asked for
(`rewards/rubric.py`) is not a verdict: it fails the sample and is never a number.

A question is asked once: verdicts are kept in the run folder (`rewards/judge_calls.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_suite.config.declarations.reward import JudgeConfig
from rlhf_suite.errors import RunError
from rlhf_suite.rewards.base import Choice, Outcome, PartsError, RewardFailure, Sample
from rlhf_suite.rewards.judge_calls import REPLY, Call, Counts, JudgeCalls
from rlhf_suite.rewards.judge_model import Ask, JudgeModel
from rlhf_suite.rewards.questions import Parts, Question, Questioner, Subject, number_of
from rlhf_suite.rewards.ranking import count_reversed
from rlhf_suite.rewards.remote import GivenUp
from rlhf_suite.rewards.rubric import NoVerdict, read_file, read_rubric

REASON = "reason"  # the name of what a judge wrote, in the files of samples


@dataclass(frozen=True)
class Answer:
    """What became of a question: what the judge says, or why it says nothing, and the end of its reply."""

    said: Parts | RewardFailure
    retries: int = 0
    reply: str = ""


class JudgeReward:
    """Scores samples by the rubric in a file. `seed`: of the run, from which the order of ranked answers is drawn."""

    def __init__(
        self,
        rubric: Path,
        config: JudgeConfig,
        model: JudgeModel,
        calls: JudgeCalls,
        choice: Choice | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.calls, self.choice, self.counts = calls, choice or Choice(), Counts()
        self.questioner = Questioner(read_rubric(read_file(rubric)), config, model.about, seed)

    def close(self) -> None:
        """Do nothing: no connection outlives a batch, and who started the engines stops them."""

    def score(self, rows: list[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in their order. Equal questions are asked once."""
        subjects = [*self.questioner.subjects(rows)]
        questions = {question.key: question for subject in subjects for question in subject.questions}
        known = {key: Answer(call.parts or {}, reply=call.reply) for key in questions if (call := self.calls.find(key))}
        asked = {key: question for key, question in questions.items() if key not in known}
        answers = known | (asyncio.run(self.ask_all(asked)) if asked else {})
        outcomes: dict[int, Outcome] = {}
        for subject in subjects:
            outcomes |= zip(subject.places, self.outcomes(subject, answers), strict=True)
        failed = sum(isinstance(outcome, RewardFailure) for outcome in outcomes.values())
        fresh, total = len(asked), sum(len(subject.questions) for subject in subjects)
        self.counts.add(answers=len(rows), cached=total - fresh, no_verdict=failed)
        return [outcomes[place] for place in range(len(rows))]

    def outcomes(self, subject: Subject, answers: Mapping[str, Answer]) -> Sequence[Outcome]:
        """Return the outcomes of the samples of one subject. Where a question has no answer none of them has a score;
        the first one counts the tries."""
        given, count = [answers[question.key] for question in subject.questions], len(subject.places)
        retries, said = sum(answer.retries for answer in given), list[Parts]()
        for answer in given:
            if isinstance(answer.said, RewardFailure):
                return [replace(answer.said, retries=retries), *[replace(answer.said, retries=0)] * (count - 1)]
            said.append(answer.said)
        if len(said) > 1:
            pairs, differ = count_reversed(*said)
            self.counts.add(pairs=pairs, pairs_reversed=differ)
        reason = "\n\n".join(answer.reply for answer in given)
        made = [self.make_outcome(parts, reason) for parts in subject.parts(said)]
        return [replace(made[0], retries=retries), *made[1:]]

    def make_outcome(self, parts: Parts, reason: str) -> Outcome:
        """Return the outcome of a sample with a verdict, and what the judge wrote."""
        value = self.questioner.value(parts)
        try:
            return replace(self.choice.make_scored(value, value, parts), reasons={REASON: reason})
        except PartsError as error:
            return RewardFailure(str(error), "error")

    async def ask_all(self, asked: Mapping[str, Question]) -> dict[str, Answer]:
        """Return what became of each question. Before an error ends the run, those under way are answered, since they
        are paid for; no other is asked."""
        places, errors = asyncio.Semaphore(self.model.concurrency), list[RunError]()

        async def answer(question: Question) -> Answer:
            async with places:
                if errors:
                    return Answer(RewardFailure(str(errors[0]), "error"))
                try:
                    return await self.judge(ask, question)
                except RunError as error:
                    errors.append(error)
                    return Answer(RewardFailure(str(error), "error"))

        async with self.model.open() as ask:
            answers = await asyncio.gather(*(answer(question) for question in asked.values()))
        if errors:
            raise errors[0]
        return dict(zip(asked, answers, strict=True))

    async def judge(self, ask: Ask, question: Question) -> Answer:
        """Return what the judge says to a question, and keep it.

        Raises:
            RunError: the budget is used up, the server refuses the key or lists no log-probabilities, or no server is
                left.
        """
        nonce = number_of(question.key, self.calls.count(question.key), self.questioner.seed)
        began, tries = time.perf_counter(), 0

        def begin() -> None:
            nonlocal tries
            self.calls.begin()
            tries += 1

        call, retries = Call(question.key), 0
        try:
            reply = await ask(question.messages(nonce), begin)
            retries, call = reply.retries, replace(call, reply=reply.text[-REPLY:], tokens=reply.tokens)
            if reply.ends_run:
                call = replace(call, problem=reply.ends_run)
                raise RunError(reply.ends_run)
            if reply.problem:
                raise NoVerdict(reply.problem)
            parts = question.read(reply, nonce)
            call, answer = replace(call, parts=parts), Answer(parts, retries, call.reply)
        except GivenUp as error:
            call, answer = replace(call, problem=error.failure.reason), Answer(error.failure, error.failure.retries)
        except NoVerdict as error:
            failure = RewardFailure(f"the judge gives no verdict: {error}", "error")
            call, answer = replace(call, problem=failure.reason), Answer(failure, retries)
        finally:
            seconds = time.perf_counter() - began
            self.counts.add(calls=tries, tokens=call.tokens, seconds=seconds)
            if tries:
                self.calls.end(replace(call, tries=tries, seconds=seconds))
        return answer
