"""What rows become, as columns of an Arrow table and back again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from rlhf_suite.data.batch import Example, Group, Item, sequences
from rlhf_suite.data.chat import Prompt

T = TypeVar("T")
PROMPT_TEXTS = ("text", "label", "datasource", "where", "columns")
PROMPT_TYPES = {"ids": pa.list_(pa.int32()), **dict.fromkeys(PROMPT_TEXTS, pa.string())}


class Codec(Protocol[T]):
    """How one kind of thing is stored. What comes back equals what was stored."""

    kind: str

    def tokens(self, item: T) -> int: ...

    def columns(self, items: Sequence[T]) -> dict[str, pa.Array]: ...

    def item(self, columns: pa.RecordBatch, row: int) -> T: ...


class ItemCodec:
    """Examples and groups: the tokens of a row's sequences end to end."""

    kind = "items"

    def tokens(self, item: Item) -> int:
        return len(item)

    def columns(self, items: Sequence[Item]) -> dict[str, pa.Array]:
        rows = [sequences(item) for item in items]
        first = rows[0][0]

        def flat(name: str) -> list[np.ndarray[Any, Any]]:
            return [np.concatenate([np.asarray(getattr(each, name)) for each in row]) for row in rows]

        def named(field: str, name: str) -> list[list[float]]:
            return [[getattr(each, field)[name] for each in row] for row in rows]

        return {
            "where": pa.array([row[0].where for row in rows]),
            "is_group": pa.array([isinstance(item, Group) for item in items]),
            "lengths": pa.array([[len(each) for each in row] for row in rows], pa.list_(pa.int32())),
            "truncated": pa.array([[each.truncated for each in row] for row in rows]),
            "ids": pa.array(flat("ids"), pa.list_(pa.int32())),
            "mask": pa.array(flat("mask"), pa.list_(pa.int8())),
            **{f"rows.{name}": pa.array(named("numbers", name), pa.list_(pa.float64())) for name in first.numbers},
            **{
                f"tokens.{name}": pa.array(
                    [[value for each in row for value in each.token_numbers[name]] for row in rows],
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
        examples = []
        for place, length in enumerate(lengths):
            part = slice(end, end := end + length)
            own = {name: each[place] for name, each in numbers.items()}
            of_tokens = {name: each[part] for name, each in per_token.items()}
            examples.append(Example(ids[part], mask[part], where, own, truncated[place], of_tokens))
        return Group(tuple(examples)) if columns.column("is_group")[row].as_py() else examples[0]


class PromptCodec:
    """Prompts to sample from, a column for each of their fields."""

    kind = "prompts"

    def tokens(self, item: Prompt) -> int:
        return len(item.ids)

    def columns(self, items: Sequence[Prompt]) -> dict[str, pa.Array]:
        names = [field.name for field in fields(Prompt)]  # a field without a type here is an error, not a loss
        return {name: pa.array([getattr(item, name) for item in items], PROMPT_TYPES[name]) for name in names}

    def item(self, columns: pa.RecordBatch, row: int) -> Prompt:
        values = {name: columns.column(name)[row] for name in columns.schema.names}
        ids = values.pop("ids").values.to_numpy().tolist()
        return Prompt(ids=ids, **{name: value.as_py() for name, value in values.items()})


def codecs() -> dict[str, Codec[Any]]:
    """Every codec by its kind."""
    return {codec.kind: codec for codec in (ItemCodec(), PromptCodec())}


def codec_of(item: object) -> Codec[Any]:
    """The codec for an encoded row."""
    return PromptCodec() if isinstance(item, Prompt) else ItemCodec()
