"""A range of the rows of a list of sources, read as they are needed: the sources may be larger than memory.

Consecutive rows may belong together (the samples of a prompt): neither the parts of shards nor chunks divide them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from rlhf_suite.config.data import RowRangeConfig
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.sources import PROMPTS, SourceFlags, locate, source_names
from rlhf_suite.errors import UserError

Given = Row | RowError


@dataclass(frozen=True)
class RowSource:
    """Which rows: of all sources one after the other, without the first `skip`, `limit` at most. Rows next to each
    other with the same `key` belong together; without a key each is alone."""

    spec: str
    split: str
    skip: int
    limit: int | None
    flags: SourceFlags
    key: Callable[[Row], object] | None = None

    def __iter__(self) -> Iterator[Given]:
        """The rows of all sources; a malformed row counts as one too."""
        for name in source_names(self.spec):
            yield from locate(name, self.split, self.flags).rows()

    def with_group_starts(self, rows: Iterator[Given]) -> Iterator[tuple[Given, bool]]:
        """Each row, and whether it begins a new group. A malformed row goes with those before it."""
        last: object = None
        is_first = True
        for row in rows:
            if self.key is None:
                yield row, True
            elif isinstance(row, RowError):
                yield row, is_first
            else:
                key = self.key(row)
                yield row, is_first or key != last
                last, is_first = key, False

    def part(self, part: int, parts: int) -> range:
        """The numbers of the rows that part i of n takes. Reads all rows once, to count them.

        The parts follow each other, so that their outputs, one after the other, are the output of the whole.
        """
        total, starts = 0, list[int]()  # of groups of several rows
        for _, is_new in self.with_group_starts(iter(self)):
            starts += [total] if is_new and self.key is not None else []
            total += 1
        start = min(self.skip, total)
        stop = total if self.limit is None else min(total, start + self.limit)
        if start == stop:
            raise UserError(
                f"{self.flags.dataset}={self.spec}: no rows are left of {total} (data.skip_samples={self.skip})"
            )
        edges = [start + (stop - start) * i // parts for i in range(parts)]
        if self.key is not None:  # on to the next group, but for the first
            edges[1:] = [min([*starts, stop][bisect_left(starts, edge)], stop) for edge in edges[1:]]
        return range(edges[part], [*edges, stop][part + 1])

    def chunks(self, rows: range, size: int) -> Iterator[tuple[range, list[Given]]]:
        """The rows of `rows` in chunks of `size`, or a few more so as to divide no group, each with their numbers."""
        start, chunk = rows.start, list[Given]()
        for row, is_new in self.with_group_starts(islice(iter(self), rows.start, rows.stop)):
            if len(chunk) >= size and is_new:
                yield range(start, start + len(chunk)), chunk
                start, chunk = start + len(chunk), []
            chunk.append(row)
        if chunk:
            yield range(start, start + len(chunk)), chunk


def prompt_rows(config: RowRangeConfig) -> RowSource:
    """The rows of `data.prompt_dataset`."""
    assert config.prompt_dataset is not None
    return RowSource(config.prompt_dataset, config.prompt_split, config.skip_samples, config.max_samples, PROMPTS)
