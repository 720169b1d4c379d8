"""Many rows through an encoder, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from rlhf_suite.data.batch import Example, Group
from rlhf_suite.data.row import BadRows, Row, RowError
from rlhf_suite.errors import UserError

Encoded_co = TypeVar("Encoded_co", covariant=True)
Progress = Callable[[int, int], None]  # rows done, rows in all
ROWS_PER_REPORT = 256


class Encoder(Protocol[Encoded_co]):
    """Makes one thing of one row."""

    def encode(self, row: Row) -> Encoded_co:
        """RowError says why the row cannot be used."""
        ...


def encode_rows(
    encoder: Encoder[Encoded_co], rows: Sequence[Row], bad: BadRows, workers: int = 0, progress: Progress | None = None
) -> list[Encoded_co]:
    """What `encoder` makes of each row it can use, in the order of the rows; the others go to `bad`.

    `workers` processes share the work (`data.dataloader_num_workers`; 0: this process). `progress` is called after
    every 256 rows and at the end. UserError if no row can be used.
    """
    encoded: list[Encoded_co] = []
    for done, item in enumerate(_results(encoder, rows, workers), start=1):
        if isinstance(item, RowError):
            bad.add(item.where, item.reason)
        else:
            encoded.append(item)
            if isinstance(item, Example | Group) and item.truncated:
                bad.note(item.where, "cut off at data.max_len")
        if progress is not None and (done % ROWS_PER_REPORT == 0 or done == len(rows)):
            progress(done, len(rows))
    if not encoded:
        raise UserError(f"none of {len(rows)} rows can be used. {bad.summary()}")
    return encoded


def _results(encoder: Encoder[Encoded_co], rows: Sequence[Row], workers: int) -> Iterator[Encoded_co | RowError]:
    if workers == 0:
        for row in rows:
            yield _try(encoder, row)
        return
    # Spawned, not forked: the parent has threads (of Ray, of the tokenizer) whose locks a fork would copy held.
    with ProcessPoolExecutor(workers, get_context("spawn"), _set_encoder, (encoder,)) as pool:
        try:
            yield from pool.map(_encode_in_worker, rows, chunksize=64)
        finally:
            pool.shutdown(cancel_futures=True)


def _try(encoder: Encoder[Encoded_co], row: Row) -> Encoded_co | RowError:
    try:
        return encoder.encode(row)
    except RowError as error:
        return error


_encoder: Encoder[Any] | None = None  # of a worker process; sent once instead of with every row


def _set_encoder(encoder: Encoder[Any]) -> None:
    global _encoder  # noqa: PLW0603 - the initialiser of a pool can only leave something in its process
    _encoder = encoder


def _encode_in_worker(row: Row) -> Any:
    assert _encoder is not None
    return _try(_encoder, row)
