"""Encoding many rows, in this process or in several."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any, Generic, Protocol, TypeVar

from rlhf_suite.data.batch import Example, Group
from rlhf_suite.data.row import BadRows, LeftOut, Row, RowError
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.errors import RunError
from rlhf_suite.registry import row_format
from rlhf_suite.waits import result as waited_for

Encoded = TypeVar("Encoded")
Encoded_co = TypeVar("Encoded_co", covariant=True)
ROWS_PER_CALL = 64  # rows that a worker process gets at a time
CALLS_AHEAD = 4  # calls in flight per worker process; this bounds the rows and results in memory


class Encoder(Protocol[Encoded_co]):
    """Turns one row into one encoded item, or into several."""

    def encode(self, row: Row) -> Encoded_co | Sequence[Encoded_co]:
        """Return what the row is encoded to.

        Raises:
            RowError: the row cannot be used, with the reason.
        """
        ...


@dataclass
class FormattedEncoder(Generic[Encoded]):
    """An encoder whose rows first go through a user's own function, `data.row_format`.

    The function gets the columns of a row as a dict and returns the columns that the encoder reads: a dict, a list of
    dicts if one row gives several, or None or an empty list to leave the row out.
    """

    encoder: Encoder[Encoded]
    name: str
    digest: str  # of its file and what that imports, so that the fingerprint of this encoder depends on them

    def encode(self, row: Row) -> list[Encoded]:
        """Return the encoded items of the row.

        Raises:
            RowError: the row cannot be used, with the reason.
        """
        try:
            made = row_format.load(self.name)(dict(row.values))
        except Exception as error:
            raise RowError(row.where, f"data.row_format raised {type(error).__name__}: {error}") from error
        if made is None or made == []:
            raise LeftOut(row.where, f"data.row_format returned {made}")
        items: list[Encoded] = []
        for values in made if isinstance(made, list) else [made]:
            if not isinstance(values, dict):
                raise RowError(row.where, f"data.row_format returned {type(values).__name__}, not a dict of columns")
            encoded = self.encoder.encode(Row(values, row.source, row.line))
            items += encoded if isinstance(encoded, Sequence) else [encoded]
        return items


def encode_rows(
    encoder: Encoder[Encoded], rows: Iterable[Row | RowError], bad: BadRows, workers: int = 0
) -> Iterator[Encoded]:
    """Yield the encoded items of all usable rows, in the order of the rows; count the other rows in `bad`.

    `workers` processes share the work (`data.dataloader_num_workers`; 0: this process). Rows are read when they are
    needed, so neither rows nor items have to fit into memory.
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
    """Return (where, note) for each way in which the items differ from their row, each change once."""
    encoded = [item for item in items if isinstance(item, Example | Group | Prompt)]
    cut = [item for item in encoded if not isinstance(item, Prompt) and item.truncated]
    cuts = [(item.where, "cut off at data.max_len") for item in cut]
    return dict.fromkeys([*cuts, *((item.where, note) for item in encoded for note in item.notes)])


Result = Sequence[Encoded] | RowError


def _results(encoder: Encoder[Encoded], rows: Iterable[Row | RowError], workers: int) -> Iterator[Result[Encoded]]:
    """Yield the result of each row, in order."""
    if workers == 0:
        for row in rows:
            yield _try(encoder, row)
        return
    # Spawned, not forked: a fork would copy the locks of the parent's threads (Ray, tokenizers) in their locked state.
    with ProcessPoolExecutor(workers, get_context("spawn"), _set_encoder, (encoder,)) as pool:
        try:
            yield from chain.from_iterable(_in_turn(pool, rows, workers * CALLS_AHEAD))
        except BrokenProcessPool:
            problem = f"data.dataloader_num_workers={workers}: a process that encodes rows was ended"
            raise RunError(f"{problem}, perhaps for lack of memory. Use fewer of them; 0 is none") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _in_turn(pool: ProcessPoolExecutor, rows: Iterable[Row | RowError], ahead: int) -> Iterator[list[Result[Any]]]:
    """Yield the pool's results in order, with at most `ahead` calls in flight (`map` would read all rows first)."""
    calls: deque[Future[list[Result[Any]]]] = deque()
    rows = iter(rows)
    while some := list(islice(rows, ROWS_PER_CALL)):
        calls.append(pool.submit(_encode_in_worker, some))
        if len(calls) == ahead:
            yield waited_for(calls.popleft(), "rows that are encoded")
    while calls:
        yield waited_for(calls.popleft(), "rows that are encoded")


def _try(encoder: Encoder[Encoded], row: Row | RowError) -> Result[Encoded]:
    """Return the encoded items of a row, or the error that says why there are none."""
    if isinstance(row, RowError):
        return row
    try:
        made = encoder.encode(row)
    except RowError as error:
        return error if error.where else RowError(row.where, error.reason)
    return made if isinstance(made, Sequence) else [made]


_encoder: Encoder[Any] | None = None  # set in a worker process, so that it is sent once and not with every row


def _set_encoder(encoder: Encoder[Any]) -> None:
    global _encoder  # noqa: PLW0603 - the initialiser of a process pool can pass values on only as globals
    _encoder = encoder


def _encode_in_worker(rows: Sequence[Row | RowError]) -> list[Result[Any]]:
    assert _encoder is not None
    return [_try(_encoder, row) for row in rows]
