"""Generate responses for rows: encode, sample by the engines and score chunk by chunk; return output rows in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.runs import GenerateRun
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings, sample_seed
from rlhf_suite.data.row import BadRows, Row, RowError
from rlhf_suite.data.row_range import RowOrError
from rlhf_suite.data.text_encoders import Prompt, PromptEncoder
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.engines.requests import Dispatcher
from rlhf_suite.offline.batch_job import Done
from rlhf_suite.offline.scored_rows import best, with_columns
from rlhf_suite.rl.scoring import Scorer, query_texts

MAX_CHUNKS = 64  # in memory at a time, while the first of them waits for a few long responses

Group = list[Generation]  # the samples of one prompt


@dataclass
class Work:
    """A chunk under way: its usable rows, and the responses so far."""

    numbers: range
    rows: list[tuple[int, Row, Prompt]]
    answers: dict[int, Generation] = field(default_factory=dict)  # by request


class Answerer:
    """Generates responses for rows and, with a scorer, scores them."""

    def __init__(
        self,
        config: GenerateRun,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        dispatcher: Dispatcher,
        scorer: Scorer | None,
    ) -> None:
        self.config, self.tokenizer, self.dispatcher, self.scorer = config, tokenizer, dispatcher, scorer
        self.encoder, self.bad = PromptEncoder(tokenizer, config.data), BadRows(config.data.on_bad_row)
        sampling = SamplingSettings.of(config.rollout, config.rollout.temperature, stop_ids)
        self.sampling = replace(sampling, log_probs=False)
        self.samples = config.rollout.n_samples_per_prompt

    def answer(self, chunks: Iterable[tuple[range, list[RowOrError]]]) -> Iterator[Done]:
        """Yield the finished chunks in order. Later chunks are sent to the engines while the first are under way."""
        source, in_flight, has_more = iter(chunks), deque[Work](), True
        while has_more or in_flight:
            while has_more and self.dispatcher.has_capacity and len(in_flight) < MAX_CHUNKS:
                chunk = next(source, None)
                if chunk is None:
                    has_more = False
                else:
                    in_flight.append(self.begin(*chunk))
            if in_flight and len(in_flight[0].answers) == len(in_flight[0].rows) * self.samples:
                yield self.finished(in_flight.popleft())
            elif in_flight:
                self.hand_over(self.dispatcher.wait_for_responses(), list(in_flight))

    def begin(self, numbers: range, rows: Sequence[RowOrError]) -> Work:
        """Encode a chunk and submit its requests."""
        work = Work(numbers, [])
        for number, row in zip(numbers, rows, strict=True):
            try:
                if isinstance(row, RowError):
                    raise row
                work.rows.append((number, row, self.encoder.encode(row)))
            except RowError as error:
                self.bad.add(error.where or row.where, error.reason)
        self.dispatcher.submit([self.request(n, p, sample) for n, _, p in work.rows for sample in range(self.samples)])
        return work

    def request(self, number: int, prompt: Prompt, sample: int) -> GenerationRequest:
        """Return the request for a sample of row `number`. Its seed depends on these numbers alone."""
        room = self.config.data.max_len - len(prompt.ids)
        return GenerationRequest(
            id=number * self.samples + sample,
            prompt_ids=prompt.ids,
            max_new_tokens=min(room, self.config.rollout.max_new_tokens or room),
            seed=sample_seed(self.config.rollout.seed, number, sample),
            sampling=self.sampling,
        )

    def hand_over(self, answers: Iterable[Generation], in_flight: Sequence[Work]) -> None:
        """Sort responses into the chunks that requested them."""
        ends = [work.numbers.stop for work in in_flight]
        for answer in answers:
            work = in_flight[int(np.searchsorted(ends, answer.id // self.samples, side="right"))]
            work.answers[answer.id] = answer

    def finished(self, work: Work) -> Done:
        """Return the output rows and sums of a chunk whose responses are complete."""
        groups = [[work.answers[number * self.samples + s] for s in range(self.samples)] for number, _, _ in work.rows]
        scores = self.scores([prompt for _, _, prompt in work.rows], groups)
        rows = [
            made
            for (_, row, prompt), group, given in zip(work.rows, groups, scores, strict=True)
            if given is not None
            for made in self.group_rows(row, prompt, group, given)
        ]
        answers = [answer for group in groups for answer in group]
        sums: dict[str, float] = {
            "prompts": len(work.rows),
            "skipped": len(work.numbers) - len(work.rows),
            "samples": len(answers),
            "tokens": sum(len(answer.ids) for answer in answers),
            "truncated": sum(answer.finish_reason == "length" for answer in answers),
        }
        if self.scorer is not None:
            known = [score for group_scores in scores if group_scores is not None for score in group_scores]
            sums |= {"scored": len(known), "score": sum(known)}
        return Done(work.numbers.stop, rows, sums)

    def group_rows(self, row: Row, prompt: Prompt, group: Group, scores: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Yield the output rows of one prompt: all samples, or the best one. `scores` is empty without a scorer."""
        texts = self.tokenizer.batch_decode([answer.ids for answer in group], skip_special_tokens=True)
        sequences = [np.concatenate([np.asarray(prompt.ids, np.int64), answer.ids]) for answer in group]
        queries = query_texts(self.tokenizer, sequences)
        # The new columns hold the contents of these two input columns, as text.
        replaced = {name for name in (self.config.data.label_key, "datasource") if name in ("label", "datasource")}
        for sample in [best(scores)] if self.config.generate.best_of_n else range(self.samples):
            made = {
                "prompt": prompt.text,
                "response": texts[sample],
                "label": prompt.label,
                "datasource": prompt.datasource,
                "sample": sample,
                "finish_reason": group[sample].finish_reason,
                "num_tokens": len(group[sample].ids),
                "reward_query": queries[sample],
            }
            yield with_columns(row.values, made | ({"score": scores[sample]} if scores else {}), replaced)

    def scores(self, prompts: Sequence[Prompt], groups: Sequence[Group]) -> list[list[float] | None]:
        """Return the scores of the samples of each group, or None for a group that reward.on_error=drop drops."""
        if self.scorer is None or not prompts:
            return [[] for _ in prompts]
        self.scorer.prompts = prompts
        trajectories = []
        for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
            for sample, answer in enumerate(group):
                trajectory = Trajectory.start(index, index, sample, prompt.ids)
                trajectory.append_model(answer.ids, np.zeros(len(answer.ids), np.float32), answer.versions)
                trajectory.finish_reason = answer.finish_reason
                trajectories.append(trajectory)
        scored, _ = self.scorer.score(trajectories)
        found: dict[int, list[float]] = {}
        for trajectory, score in zip(scored.trajectories, scored.scores.tolist(), strict=True):
            found.setdefault(trajectory.group, []).append(score)
        return [found.get(index) for index in range(len(prompts))]
