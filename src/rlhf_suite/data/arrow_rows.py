"""Values of Arrow tables as the same rows would have them in a file of JSON lines.

Arrow has one type for a whole column. So a struct gets every key that any struct of its column has, with null for those
that it lacks; text of JSON is text with a type of its own; and pandas stores integers with gaps as floating-point
numbers. Here each value gets back what its row says:

- Keys of structs whose value is null are removed. Nulls in lists, in maps and in whole columns stay: Arrow adds none.
- In JSON schemas null is a value of `default` and `const`. Whether the row had it is not stored, so it stays where it
  makes sense: see `_is_written`.
- A column of floating-point numbers with gaps, all of which are whole, is one of integers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

Change = Callable[[Any], Any]
VALUES = ("default", "const")  # keys of JSON schemas whose value may be null
KINDS = ("type", "anyOf", "oneOf", "allOf", "enum", "$ref", "properties")  # keys that say which values are valid
KEYWORDS = {*VALUES, *KINDS, "description", "title"}
EXACT = 2.0**53  # integers up to here are floating-point numbers without rounding


def check_offsets(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return a batch that was read as it lay on disk; raise ArrowInvalid where its texts and lists are said to lie
    outside of it. pyarrow would read there, and the process would die. Text that is not UTF-8 passes."""
    from pyarrow import ArrowInvalid

    for column in batch.columns:
        try:
            column.validate(full=True)
        except ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
    return batch


def changes(schema: pyarrow.Schema, integers: Iterable[str] = ()) -> dict[str, Change]:
    """Return how the values of columns change, by name, without the columns that stay as they are. `integers`: the
    columns whose floating-point numbers are integers."""
    column_changes = {field.name: change_of(field.type) for field in schema} | dict.fromkeys(integers, whole)
    return {name: change for name, change in column_changes.items() if change is not None}


def apply_changes(values: Mapping[str, object], how: Mapping[str, Change]) -> dict[str, object]:
    """Return the values of a row, changed."""
    return {name: how[name](value) if name in how else value for name, value in values.items()}


def integer_columns(schema: pyarrow.Schema, chunks: Callable[[str], Iterable[pyarrow.Array]]) -> list[str]:
    """Return the columns of floating-point numbers with gaps (null or NaN) whose numbers are all integers. `chunks`
    returns the values of a column."""
    import pyarrow

    names = [field.name for field in schema if field.type in (pyarrow.float32(), pyarrow.float64())]
    return [name for name in names if _has_gaps_in_integers(chunks(name))]


def _has_gaps_in_integers(chunks: Iterable[pyarrow.Array]) -> bool:
    """Return whether some of the numbers are missing, and all others are integers."""
    from pyarrow import compute

    gaps, numbers = 0, 0
    for chunk in chunks:
        present = compute.drop_null(compute.if_else(compute.is_nan(chunk), None, chunk))
        are_whole = compute.and_(
            compute.equal(compute.floor(present), present), compute.less(compute.abs(present), EXACT)
        )
        if not compute.all(are_whole, min_count=0).as_py():
            return False
        gaps, numbers = gaps + len(chunk) - len(present), numbers + len(present)
    return gaps > 0 and numbers > 0


def whole(value: float | None) -> int | None:
    """Return a number as an integer; None for NaN."""
    return None if value is None or math.isnan(value) else int(value)


def change_of(kind: pyarrow.DataType) -> Change | None:
    """Return how values of an Arrow type, as Python has them, change; None if they stay as they are."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.JsonType):
        return _parse_json
    if isinstance(kind, pyarrow.BaseExtensionType):  # such as the arrays of two dimensions of `datasets`
        return change_of(kind.storage_type)
    if types.is_struct(kind):
        return _struct_change({field.name: field.type for field in kind})
    if types.is_map(kind):
        return _map_change(change_of(kind.item_type))
    if hasattr(kind, "value_type") and not types.is_dictionary(kind):  # the kinds of lists
        return _list_change(change_of(kind.value_type))
    return None


def _parse_json(value: object) -> object:
    """Return the value of a text of JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _list_change(item: Change | None) -> Change | None:
    return (
        None if item is None else lambda value: [item(entry) for entry in value] if isinstance(value, list) else value
    )


def _map_change(item: Change | None) -> Change:
    def change(value: object) -> object:
        if not isinstance(value, list):
            return value
        return {key: entry if item is None else item(entry) for key, entry in value}

    return change


def _struct_change(kinds: Mapping[str, pyarrow.DataType]) -> Change:
    """Return the change of a struct with fields of these types."""
    from pyarrow import types

    how = {name: change_of(kind) for name, kind in kinds.items()}
    always_null = {name for name, kind in kinds.items() if types.is_null(kind)}

    def change(value: object) -> object:
        if not isinstance(value, dict):  # null, or what the library `datasets` made of it
            return value
        given = {name: _apply(how.get(name), entry) for name, entry in value.items()}
        _drop_defaults_of_required(given)
        return {
            name: entry for name, entry in given.items() if entry is not None or _is_written(name, given, always_null)
        }

    return change


def _apply(change: Change | None, value: object) -> object:
    return value if change is None or value is None else change(value)


def _drop_defaults_of_required(schema: Mapping[str, object]) -> None:
    """Remove null as the default of properties that an object must have, unless null is one of their values."""
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        for name in required:
            declared = properties.get(name) if isinstance(name, str) else None
            if isinstance(declared, dict) and declared.get("default", "") is None and not _allows_null(declared):
                del declared["default"]


def _is_written(name: str, schema: Mapping[str, object], always_null: set[str]) -> bool:
    """Return whether null is what the row says for key `name` of a JSON schema.

    `default`: the schema allows null, or no schema of the column has another default. `const`: nothing else says which
    values are valid, or that is null too.
    """
    if name not in VALUES or not (
        schema.keys() <= KEYWORDS or any(schema.get(keyword) is not None for keyword in KEYWORDS)
    ):
        return False
    if name == "default":
        return name in always_null or _allows_null(schema)
    is_defined = any(schema.get(keyword) is not None for keyword in KINDS)
    return not is_defined or (name in always_null and _allows_null(schema))


def _allows_null(schema: Mapping[str, object]) -> bool:
    """Return whether null is a valid value of a JSON schema, as far as it says so itself."""
    kind = schema.get("type")
    if kind is not None:
        return kind == "null" or "null" in _list(kind)
    either = (choice for key in ("anyOf", "oneOf") for choice in _list(schema.get(key)) if isinstance(choice, dict))
    return None in _list(schema.get("enum")) or any(map(_allows_null, either))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
