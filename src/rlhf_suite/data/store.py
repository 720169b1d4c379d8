"""Encoded rows in one Arrow file that is mapped into memory, so that only the parts that are read take up memory.

A store is written once, row by row, and then read in any order. On disk it is a folder with the rows in batches, the
number of tokens of each row, and a summary. It is passed to other processes as its path.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlhf_suite.data.batch import Example, Group, Item, sequences
from rlhf_suite.data.cache import open_locked
from rlhf_suite.data.combine import LazySequence
from rlhf_suite.data.images import Image
from rlhf_suite.data.row import BadRows
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.errors import UserError

T = TypeVar("T")
ROWS, COUNTS, SUMMARY = "rows.arrow", "counts.npy", "summary.json"
BATCH_TOKENS = 1 << 19  # tokens of a batch, which is kept in memory (about 20 MB) until it is full


@dataclass(frozen=True)
class Layout:
    """What an Arrow file contains: items of the codec named `kind`; batch b ends with item `ends[b] - 1`."""

    codec: str
    ends: NDArray[np.int64]  # [number of batches]
    counts: NDArray[np.int32]  # [number of items], the tokens of each item


class Store(LazySequence[T]):
    """Items read from an Arrow file, in a folder or in memory. `lock_file` protects the folder from removal."""

    def __init__(self, source: Path | pa.Buffer, layout: Layout, lock_file: IO[bytes] | None = None) -> None:
        self.source, self.layout, self.lock_file = source, layout, lock_file
        self.codec: Codec[T] = codecs()[layout.codec]
        on_disk = isinstance(source, Path)
        self.file = pa.ipc.open_file(pa.memory_map(str(source / ROWS)) if on_disk else pa.BufferReader(source))
        self.latest: tuple[int, Any] = (-1, None)  # number and content of the batch that was read last

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if isinstance(self.source, Path):
            return open_in_process, (self.source,)
        return Store, (self.source, self.layout)

    def __len__(self) -> int:
        return len(self.layout.counts)

    def at(self, place: int) -> T:
        batch = int(np.searchsorted(self.layout.ends, place, side="right"))
        if self.latest[0] != batch:
            self.latest = (batch, self.file.get_batch(batch))
        columns = self.latest[1]
        return self.codec.item(columns, place - int(self.layout.ends[batch]) + columns.num_rows)


def in_memory(items: Iterable[T]) -> Store[T]:
    """Return a store of the items in memory, as compact as on disk."""
    sink = pa.BufferOutputStream()
    layout = write_rows(items, sink)
    return Store(sink.getvalue(), layout)


def write_folder(items: Iterable[T], folder: Path, bad: BadRows) -> None:
    """Write the files of a store. `bad` is read after the items, when its counts are complete."""
    with pa.OSFile(str(folder / ROWS), "wb") as sink:
        layout = write_rows(items, sink)
    np.save(folder / COUNTS, layout.counts)
    summary = {"codec": layout.codec, "ends": layout.ends.tolist(), "rows": vars(bad)}
    (folder / SUMMARY).write_text(json.dumps(summary), encoding="utf-8")


def open_folder(folder: Path) -> tuple[Store[Any], BadRows] | None:
    """Return the store in a folder and the row counts of its encoding; None if there is no complete store."""
    try:
        lock_file = open_locked(folder / SUMMARY)
        summary = json.load(lock_file)
        counts = np.load(folder / COUNTS, mmap_mode="r")
        ends = np.array(summary["ends"], np.int64)
        store: Store[Any] = Store(folder, Layout(summary["codec"], ends, counts), lock_file)
        whole = store.file.num_record_batches == len(ends) and ends[-1] == len(counts)
    except (OSError, ValueError, KeyError, EOFError):  # the errors of pyarrow and json are ValueErrors
        return None
    rows = summary["rows"]
    counted = {name: Counter(rows[name]) for name in ("bad", "left_out", "noted")}
    bad = BadRows(rows["policy"], **counted, first=rows["first"], rows=rows["rows"])
    return (store, bad) if whole else None


def open_in_process(folder: Path) -> Store[Any]:
    """Open a store that another process, perhaps on another node, has written.

    Raises:
        UserError: this node does not see the folder.
    """
    opened = open_folder(folder)
    if opened is None:
        raise UserError(
            f"data.cache_enable=true: this node does not see the encoded rows in {folder}. Set XDG_CACHE_HOME to a "
            "folder that all nodes see, or write data.cache_enable=false"
        )
    return opened[0]


def write_rows(items: Iterable[T], sink: Any) -> Layout:
    """Write the items, at least one, in batches of about BATCH_TOKENS tokens, and return their layout."""
    counts, ends = array("i"), []
    writer: Any = None
    for batch in batches(items):
        codec = codec_of(batch[0])
        columns = pa.RecordBatch.from_pydict(codec.columns(batch))
        writer = writer or pa.ipc.new_file(sink, columns.schema)
        writer.write_batch(columns)
        counts.extend(map(codec.tokens, batch))
        ends.append(len(counts))
    writer.close()
    return Layout(codec.name, np.array(ends, np.int64), np.frombuffer(counts, np.int32))


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items in lists of about BATCH_TOKENS tokens."""
    batch: list[T] = []
    tokens = 0
    for item in items:
        batch.append(item)
        tokens += codec_of(item).tokens(item)
        if tokens >= BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


IMAGE = pa.struct([("start", pa.int32()), ("length", pa.int32()), ("data", pa.large_binary())])
IMAGES, IMAGE_ROWS = pa.list_(IMAGE), pa.list_(pa.list_(IMAGE))  # of a sequence, of all sequences of an item
PROMPT_TEXTS = ("text", "label", "datasource", "where", "columns", "chat")
PROMPT_TYPES = {"ids": pa.list_(pa.int32()), **dict.fromkeys(PROMPT_TEXTS, pa.string()), "images": IMAGES}
PROMPT_TYPES["teacher_ids"] = PROMPT_TYPES["ids"]


def image_rows(examples: Sequence[Example]) -> list[list[dict[str, Any]]]:
    """Return the images of each of the sequences of an item as they are stored."""
    return [[vars(image) for image in example.images or ()] for example in examples]


def read_images(value: pa.Scalar) -> tuple[Image, ...] | None:
    """Return the images of a sequence."""
    images = value.as_py()
    return None if images is None else tuple(Image(**image) for image in images)


class Codec(Protocol[T]):
    """How items of one class are stored. A stored item is equal to the original when it is read back."""

    name: str

    def tokens(self, item: T) -> int: ...

    def columns(self, items: Sequence[T]) -> dict[str, pa.Array]: ...

    def item(self, columns: pa.RecordBatch, row: int) -> T: ...


class ItemCodec:
    """The codec of examples and groups. The tokens of all sequences of an item follow each other in one list."""

    name = "items"

    def tokens(self, item: Item) -> int:
        return len(item)

    def columns(self, items: Sequence[Item]) -> dict[str, pa.Array]:
        rows = [sequences(item) for item in items]
        first = rows[0][0]

        def flat(name: str) -> list[np.ndarray[Any, Any]]:
            return [np.concatenate([np.asarray(getattr(sequence, name)) for sequence in row]) for row in rows]

        def column_of(field: str, name: str) -> list[list[float]]:
            return [[getattr(sequence, field)[name] for sequence in row] for row in rows]

        return {
            "where": pa.array([row[0].where for row in rows]),
            "is_group": pa.array([isinstance(item, Group) for item in items]),
            "lengths": pa.array([[len(sequence) for sequence in row] for row in rows], pa.list_(pa.int32())),
            "truncated": pa.array([[sequence.truncated for sequence in row] for row in rows]),
            "ids": pa.array(flat("ids"), pa.list_(pa.int32())),
            "mask": pa.array(flat("mask"), pa.list_(pa.int8())),
            **({} if first.images is None else {"images": pa.array([image_rows(row) for row in rows], IMAGE_ROWS)}),
            **{f"rows.{name}": pa.array(column_of("numbers", name), pa.list_(pa.float64())) for name in first.numbers},
            **{
                f"tokens.{name}": pa.array(
                    [[value for sequence in row for value in sequence.token_numbers[name]] for row in rows],
                    pa.list_(pa.float64()),
                )
                for name in first.token_numbers
            },
        }

    def item(self, columns: pa.RecordBatch, row: int) -> Item:
        def values(name: str) -> list[Any]:
            return list(columns.column(name)[row].values.to_numpy(zero_copy_only=False).tolist())

        names = columns.schema.names
        ids, mask, truncated, lengths = (values(name) for name in ("ids", "mask", "truncated", "lengths"))
        numbers = {name.removeprefix("rows."): values(name) for name in names if name.startswith("rows.")}
        per_token = {name.removeprefix("tokens."): values(name) for name in names if name.startswith("tokens.")}
        where, end = columns.column("where")[row].as_py(), 0
        images = columns.column("images")[row] if "images" in names else None
        examples = []
        for place, length in enumerate(lengths):
            part = slice(end, end := end + length)
            own = {name: column[place] for name, column in numbers.items()}
            of_tokens = {name: column[part] for name, column in per_token.items()}
            seen = None if images is None else read_images(images[place])
            examples.append(Example(ids[part], mask[part], where, own, truncated[place], of_tokens, images=seen))
        return Group(tuple(examples)) if columns.column("is_group")[row].as_py() else examples[0]


class PromptCodec:
    """The codec of prompts to sample from: one column for each field."""

    name = "prompts"

    def tokens(self, item: Prompt) -> int:
        return len(item.ids)

    def columns(self, items: Sequence[Prompt]) -> dict[str, pa.Array]:
        # Notes, index and source are not stored. A field that PROMPT_TYPES lacks raises KeyError.
        names = [field.name for field in fields(Prompt) if field.compare]
        values = {name: [getattr(item, name) for item in items] for name in names}
        values["images"] = [
            None if row_images is None else [vars(image) for image in row_images] for row_images in values["images"]
        ]
        return {name: pa.array(values[name], PROMPT_TYPES[name]) for name in names}

    def item(self, columns: pa.RecordBatch, row: int) -> Prompt:
        values = {name: columns.column(name)[row] for name in columns.schema.names}
        ids, images = values.pop("ids").values.to_numpy().tolist(), read_images(values.pop("images"))
        return Prompt(ids=ids, images=images, **{name: value.as_py() for name, value in values.items()})


def codecs() -> dict[str, Codec[Any]]:
    """Return every codec by its `kind`."""
    return {codec.name: codec for codec in (ItemCodec(), PromptCodec())}


def codec_of(item: object) -> Codec[Any]:
    """Return the codec for an encoded item."""
    return PromptCodec() if isinstance(item, Prompt) else ItemCodec()
