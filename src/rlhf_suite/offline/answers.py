"""Generate responses for rows: encode, sample by the engines and score chunk by chunk; return output rows in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_suite.background import Ended
from rlhf_suite.config.runs import GenerateRun
from rlhf_suite.data.row import BadRows, Row, RowError
from rlhf_suite.data.row_range import RowOrError
from rlhf_suite.data.text_encoders import Prompt, PromptEncoder
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.offline.batch_job import Done
from rlhf_suite.offline.scored_rows import best, with_columns
from rlhf_suite.rl.sampling import Sampler
from rlhf_suite.rl.scoring import Scorer, query_texts

MAX_CHUNKS = 64  # in memory at a time, while the first of them waits for a few long responses

Group = list[Trajectory]  # the samples of one prompt


@dataclass
class Work:
    """A chunk under way: its usable rows, and the samples so far."""

    numbers: range
    rows: list[tuple[int, Row, Prompt]]
    groups: dict[int, Group] = field(default_factory=dict)  # by the number of the row

    @property
    def is_complete(self) -> bool:
        """Whether every row has its samples."""
        return len(self.groups) == len(self.rows)


class Answerer:
    """Generates responses for rows, for at most `limit` rows at a time, and with a scorer scores them."""

    def __init__(
        self,
        config: GenerateRun,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        scorer: Scorer | None,
        limit: int,
    ) -> None:
        self.config, self.tokenizer, self.sampler, self.scorer = config, tokenizer, sampler, scorer
        self.encoder, self.bad = PromptEncoder(tokenizer, config.data), BadRows(config.data.on_bad_row)
        self.samples, self.limit, self.running = config.rollout.n_samples_per_prompt, limit, 0
        self.ended: Ended[Group] = Ended("responses to rows")

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
            if in_flight and in_flight[0].is_complete:
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
            self.ended.add(self.sampler.begin(number, prompt, self.samples, settings, ()))
        self.running += len(work.rows)
        return work

    def hand_over(self, group: Group, in_flight: Sequence[Work]) -> None:
        """Give the samples of a row to the chunk that has it."""
        number, ends = group[0].group, [work.numbers.stop for work in in_flight]
        in_flight[int(np.searchsorted(ends, number, side="right"))].groups[number] = group
        self.running -= 1

    def finish(self, work: Work) -> Done:
        """Return the output rows and sums of a chunk whose responses are complete."""
        groups = [work.groups[number] for number, _, _ in work.rows]
        scores = self.scores(groups)
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
        queries = query_texts(self.tokenizer, [trajectory.ids for trajectory in group])
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

    def scores(self, groups: Sequence[Group]) -> list[list[float] | None]:
        """Return the scores of the samples of each group, or None for a group that reward.on_error=drop drops."""
        if self.scorer is None or not groups:
            return [[] for _ in groups]
        scored, _ = self.scorer.score(list(chain.from_iterable(groups)))
        by_group: dict[int, list[float]] = {}
        for trajectory, score in zip(scored.trajectories, scored.scores.tolist(), strict=True):
            by_group.setdefault(trajectory.group, []).append(score)
        return [by_group.get(group[0].group) for group in groups]
