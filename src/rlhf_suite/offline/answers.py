"""Generate responses for rows: encode, sample by the engines and score chunk by chunk; return output rows in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_suite.background import Ended
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.data.row import BadRows, Row, RowError
from rlhf_suite.data.row_range import RowOrError
from rlhf_suite.data.text_encoders import Prompt, PromptEncoder
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.offline.batch_job import Done
from rlhf_suite.offline.scored_rows import best, with_columns
from rlhf_suite.rl.sampling import Sampler
from rlhf_suite.rl.scoring import ScoredGroup, Scorer, ScoringInParts, query_ids, query_texts

MAX_CHUNKS = 64  # in memory at a time, while the first of them waits for a few long responses

Group = list[Trajectory]  # the samples of one prompt


@dataclass
class Work:
    """A chunk under way: its usable rows, and their samples and scores so far, by the number of the row."""

    numbers: range
    rows: list[tuple[int, Row, Prompt]]
    groups: dict[int, Group] = field(default_factory=dict)
    scores: dict[int, ScoredGroup] = field(default_factory=dict)


class Answerer:
    """Generates responses for rows, for at most `limit` rows at a time, and with a scorer scores them meanwhile."""

    def __init__(
        self,
        config: Run,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        scorer: Scorer | None,
        limit: int,
    ) -> None:
        self.config, self.tokenizer, self.sampler, self.scorer = config, tokenizer, sampler, scorer
        self.parts = None if scorer is None else ScoringInParts(scorer, sampler.engines.loop)
        self.encoder, self.bad = PromptEncoder(tokenizer, config.data), BadRows(config.data.on_bad_row)
        self.samples, self.limit, self.running = config.rollout.n_samples_per_prompt, limit, 0
        self.ended: Ended[Any] = Ended("responses to rows")  # a Group, and later its ScoredGroup

    def answer(self, chunks: Iterable[tuple[range, list[RowOrError]]]) -> Iterator[Done]:
        """Yield the finished chunks in order. Later chunks are sent to the engines while the first are under way."""
        source, in_flight, has_more = iter(chunks), deque[Work](), True
        while has_more or in_flight:
            while has_more and self.running < self.limit and len(in_flight) < MAX_CHUNKS:
                chunk = next(source, None)
                if chunk is None:
                    has_more = False
                else:
                    in_flight.append(self.begin(*chunk))
            if in_flight and self.is_complete(in_flight[0]):
                yield self.finish(in_flight.popleft())
            elif in_flight:
                self.hand_over(next(self.ended.results(1)), list(in_flight))

    def begin(self, numbers: range, rows: Sequence[RowOrError]) -> Work:
        """Encode a chunk and start its samples. Their seeds depend on the number of the row and of the sample alone."""
        work = Work(numbers, [])
        settings = replace(self.sampler.settings(self.config.rollout.temperature), log_probs=False)
        for number, row in zip(numbers, rows, strict=True):
            try:
                if isinstance(row, RowError):
                    raise row
                work.rows.append((number, row, replace(self.encoder.encode(row), index=number)))
            except RowError as error:
                self.bad.add(error.where or row.where, error.reason)
        for number, _, prompt in work.rows:
            responses = self.sampler.begin(number, prompt, self.samples, settings, ())
            self.ended.add(responses)
            if self.parts is not None:
                self.ended.add(self.parts.start(responses))
        self.running += len(work.rows)
        return work

    def is_complete(self, work: Work) -> bool:
        """Return whether every row of a chunk has its samples, and its scores if there is a scorer."""
        return len(work.rows) == len(work.groups if self.scorer is None else work.scores)

    def hand_over(self, made: Group | ScoredGroup, in_flight: Sequence[Work]) -> None:
        """Give the samples of a row, or later their scores, to the chunk that has it."""
        number = made.number if isinstance(made, ScoredGroup) else made[0].group
        work = in_flight[int(np.searchsorted([work.numbers.stop for work in in_flight], number, side="right"))]
        if isinstance(made, ScoredGroup):
            work.scores[number] = made
        else:
            work.groups[number] = made
            self.running -= 1

    def finish(self, work: Work) -> Done:
        """Return the output rows and sums of a chunk whose responses are complete."""
        groups, scores = [work.groups[number] for number, _, _ in work.rows], self.scores(work)
        rows = [
            made
            for (_, row, prompt), group, given in zip(work.rows, groups, scores, strict=True)
            if given is not None
            for made in self.group_rows(row, prompt, group, given)
        ]
        samples = [sample for group in groups for sample in group]
        sums: dict[str, float] = {
            "prompts": len(work.rows),
            "skipped": len(work.numbers) - len(work.rows),
            "samples": len(samples),
            "tokens": sum(sample.response_length for sample in samples),
            "truncated": sum(sample.truncated for sample in samples),
        }
        if self.scorer is not None:
            known = [score for group_scores in scores if group_scores is not None for score in group_scores]
            sums |= {"scored": len(known), "score": sum(known)}
        return Done(work.numbers.stop, rows, sums)

    def group_rows(self, row: Row, prompt: Prompt, group: Group, scores: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Yield the output rows of one prompt: all samples, or the best one. `scores` is empty without a scorer."""
        texts = self.tokenizer.batch_decode([trajectory.response_ids for trajectory in group], skip_special_tokens=True)
        queries = query_texts(self.tokenizer, [query_ids(trajectory) for trajectory in group])
        # The new columns hold the contents of these two input columns, as text.
        replaced = {name for name in (self.config.data.label_key, "datasource") if name in ("label", "datasource")}
        for sample in [best(scores)] if self.config.generate.best_of_n else range(self.samples):
            made = {
                "prompt": prompt.text,
                "response": texts[sample],
                "label": prompt.label,
                "datasource": prompt.datasource,
                "sample": sample,
                "finish_reason": group[sample].ending.finish_reason,
                "num_tokens": group[sample].response_length,
                "reward_query": queries[sample],
            }
            yield with_columns(row.values, made | ({"score": scores[sample]} if scores else {}), replaced)

    def scores(self, work: Work) -> list[list[float] | None]:
        """Return the scores of the samples of each row, or None for a row that reward.on_error=drop drops."""
        if self.scorer is None:
            return [[] for _ in work.rows]
        groups = [work.scores[number] for number, _, _ in work.rows]
        self.scorer.check(groups)
        return [None if group.samples is None else group.samples.scores.tolist() for group in groups]
