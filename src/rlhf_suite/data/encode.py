"""Many rows through an encoder, in this process or in several."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from rlhf_suite.data.batch import Example, Group
from rlhf_suite.data.row import BadRows, LeftOut, Row, RowError

Encoded = TypeVar("Encoded")
Encoded_co = TypeVar("Encoded_co", covariant=True)
ROWS_PER_CALL = 64  # of a worker process
CALLS_AHEAD = 4  # for each worker process: what bounds the rows and results that are held at once


class Encoder(Protocol[Encoded_co]):
    """Makes one thing of one row, or several."""

    def encode(self, row: Row) -> Encoded_co | Sequence[Encoded_co]:
        """RowError says why the row cannot be used."""
        ...


def encode_rows(
    encoder: Encoder[Encoded], rows: Iterable[Row | RowError], bad: BadRows, workers: int = 0
) -> Iterator[Encoded]:
    """What `encoder` makes of each row it can use, in the order of the rows; the others go to `bad`.

    `workers` processes share the work (`data.dataloader_num_workers`; 0: this process). Rows are read as they are
    needed, so neither they nor the results have to fit into memory.
    """
    for result in _results(encoder, rows, workers):
        bad.rows += 1
        if isinstance(result, LeftOut):
            bad.leave_out(result.where, result.reason)
            continue
        if isinstance(result, RowError):
            bad.add(result.where, result.reason)
            continue
        for where, note in _notes(result):
            bad.note(where, note)
        yield from result


def _notes(items: Sequence[object]) -> Iterable[tuple[str, str]]:
    """How what was made of a row is not as the row says, each change once."""
    found = [item for item in items if isinstance(item, Example | Group)]
    cuts = [(item.where, "cut off at data.max_len") for item in found if item.truncated]
    return dict.fromkeys([*cuts, *((item.where, note) for item in found for note in item.notes)])


Result = Sequence[Encoded] | RowError


def _results(encoder: Encoder[Encoded], rows: Iterable[Row | RowError], workers: int) -> Iterator[Result[Encoded]]:
    if workers == 0:
        for row in rows:
            yield _try(encoder, row)
        return
    # Spawned, not forked: the parent has threads (of Ray, of the tokenizer) whose locks a fork would copy held.
    with ProcessPoolExecutor(workers, get_context("spawn"), _set_encoder, (encoder,)) as pool:
        try:
            yield from chain.from_iterable(_in_turn(pool, rows, workers * CALLS_AHEAD))
        finally:
            pool.shutdown(cancel_futures=True)


def _in_turn(pool: ProcessPoolExecutor, rows: Iterable[Row | RowError], ahead: int) -> Iterator[list[Result[Any]]]:
    """The pool's results in order, with at most `ahead` calls under way (`map` would read all rows first)."""
    calls: deque[Future[list[Result[Any]]]] = deque()
    rows = iter(rows)
    while some := list(islice(rows, ROWS_PER_CALL)):
        calls.append(pool.submit(_encode_in_worker, some))
        if len(calls) == ahead:
            yield calls.popleft().result()
    while calls:
        yield calls.popleft().result()


def _try(encoder: Encoder[Encoded], row: Row | RowError) -> Result[Encoded]:
    if isinstance(row, RowError):
        return row
    try:
        made = encoder.encode(row)
    except RowError as error:
        return error
    return made if isinstance(made, Sequence) else [made]


_encoder: Encoder[Any] | None = None  # of a worker process; sent once instead of with every row


def _set_encoder(encoder: Encoder[Any]) -> None:
    global _encoder  # noqa: PLW0603 - the initialiser of a pool can only leave something in its process
    _encoder = encoder


def _encode_in_worker(rows: Sequence[Row | RowError]) -> list[Result[Any]]:
    assert _encoder is not None
    return [_try(_encoder, row) for row in rows]
