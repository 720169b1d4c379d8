"""A range of the rows of several sources, read when needed: the sources may be larger than memory.

Consecutive rows may belong together (the samples of one prompt). Neither shards nor chunks split such a group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.sources import PROMPTS, SourceFlags, locate, source_names
from rlhf_suite.errors import UserError

RowOrError = Row | RowError


@dataclass(frozen=True)
class RowSource:
    """The rows of all sources, one source after the other, without the first `skip` and at most `limit` of them.

    Neighbouring rows with the same `key` belong to one group; without a key each row is its own group.
    """

    spec: str
    split: str
    skip: int
    limit: int | None
    flags: SourceFlags
    key: Callable[[Row], object] | None = None

    def __iter__(self) -> Iterator[RowOrError]:
        """Yield the rows of all sources. A malformed row counts as a row."""
        for name in source_names(self.spec):
            yield from locate(name, self.split, self.flags).rows()

    def with_group_starts(self, rows: Iterator[RowOrError]) -> Iterator[tuple[RowOrError, bool]]:
        """Yield (row, whether it starts a new group). A malformed row belongs to the group before it."""
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
        """Return the numbers of the rows in part `part` of `parts`. This reads all rows once, to count them.

        The parts follow each other, so their outputs, concatenated, are the output of the whole.
        """
        total, starts = 0, list[int]()  # `starts`: the first row of each group, if rows are grouped
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
        if self.key is not None:  # every part but the first begins with a whole group
            edges[1:] = [min([*starts, stop][bisect_left(starts, edge)], stop) for edge in edges[1:]]
        return range(edges[part], [*edges, stop][part + 1])

    def chunks(self, rows: range, size: int) -> Iterator[tuple[range, list[RowOrError]]]:
        """Yield (row numbers, rows) for chunks of `size` rows, or a few more where a group would be split."""
        start, chunk = rows.start, list[RowOrError]()
        for row, is_new in self.with_group_starts(islice(iter(self), rows.start, rows.stop)):
            if len(chunk) >= size and is_new:
                yield range(start, start + len(chunk)), chunk
                start, chunk = start + len(chunk), []
            chunk.append(row)
        if chunk:
            yield range(start, start + len(chunk)), chunk


def prompt_rows(config: DataConfig) -> RowSource:
    """Return the rows of `data.prompt_dataset`."""
    assert config.prompt_dataset is not None
    return RowSource(config.prompt_dataset, config.prompt_split, config.skip_samples, config.max_samples, PROMPTS)
