"""A range of the rows of a list of sources, read as they are needed: the sources may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rlhf_suite.config.data import RowRangeConfig
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.rows import source_names
from rlhf_suite.data.sources import PROMPTS, read_source
from rlhf_suite.errors import UserError


def all_rows(config: RowRangeConfig) -> Iterator[Row | RowError]:
    """The rows of all sources, one source after the other; a malformed row counts as one too."""
    assert config.prompt_dataset is not None
    for name in source_names(config.prompt_dataset):
        yield from read_source(name, config.prompt_split, PROMPTS)


def row_range(config: RowRangeConfig, shard: tuple[int, int]) -> range:
    """The numbers of the rows that part i of n, (i, n), takes. Reads all rows once, to count them.

    The parts follow each other, so that their outputs, one after the other, are the output of the whole.
    """
    total = sum(1 for _ in all_rows(config))
    start = min(config.skip_samples, total)
    stop = total if config.max_samples is None else min(total, start + config.max_samples)
    if start == stop:
        raise UserError(
            f"data.prompt_dataset={config.prompt_dataset}: no rows are left of {total} "
            f"(data.skip_samples={config.skip_samples})"
        )
    part, parts = shard
    taken, count = start, stop - start
    return range(taken + count * part // parts, taken + count * (part + 1) // parts)


def chunks(config: RowRangeConfig, rows: range, size: int) -> Iterator[tuple[range, list[Row | RowError]]]:
    """The rows of `rows` in groups of `size`, each with their numbers."""
    source = islice(all_rows(config), rows.start, rows.stop)
    for start in range(rows.start, rows.stop, size):
        chunk = list(islice(source, size))
        yield range(start, start + len(chunk)), chunk
