"""The encoding of protocol buffers, for the few messages of the protocol (`messages`).

A message is a dict of its fields by name. Its schema says for each field number the name and the kind: "int" (bools and
enums too), "double", "bytes", "text", or the schema of a message inside.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_suite.serving.http_server import BadRequest

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # the wire types
FIXED = {FIXED64: 8, FIXED32: 4}  # bytes
WIRE_TYPES = {"int": VARINT, "double": FIXED64}  # of kinds; all others have their length before them
ABSENT: Mapping[str, Any] = {"int": 0, "double": 0.0, "bytes": b"", "text": ""}  # values that an entry of a map omits
TWO_64 = 1 << 64


@dataclass(frozen=True)
class Field:
    """A field of a message: `many` values of it are a list, and the entries of a `map` a dict."""

    name: str
    kind: str | Mapping[int, Field]
    many: bool = False
    map: bool = False


Schema = Mapping[int, Field]


def make_map(name: str, kind: str | Schema) -> Field:
    """Return a field that is a map from texts to values."""
    return Field(name, {1: Field("key", "text"), 2: Field("value", kind)}, map=True)


def decode(schema: Schema, data: bytes) -> dict[str, Any]:
    """Return the fields of a message that are in `data`; those that the schema does not have are left out.

    Raises:
        BadRequest: these bytes are not such a message.
    """
    result: dict[str, Any] = {}
    for number, wire_type, raw in read_fields(data):
        field = schema.get(number)
        if field is None:
            continue
        if field.map:
            entry = decode(kind_of(field), as_bytes(raw))
            kind = kind_of(field)[2].kind
            absent = ABSENT[kind] if isinstance(kind, str) else {}
            result.setdefault(field.name, {})[entry.get("key", "")] = entry.get("value", absent)
        elif field.many:
            packed = field.kind == "int" and wire_type == LENGTH
            values = list(read_packed(as_bytes(raw))) if packed else [value_of(field.kind, raw)]
            result.setdefault(field.name, []).extend(values)
        else:
            result[field.name] = value_of(field.kind, raw)
    return result


def kind_of(field: Field) -> Schema:
    """Return the schema of a field that is a message."""
    assert not isinstance(field.kind, str)
    return field.kind


def as_bytes(raw: int | bytes) -> bytes:
    """Return what a field has that is not a number."""
    if isinstance(raw, int):
        raise BadRequest("the request is not a message of the protocol: a field has a number in place of bytes")
    return raw


def value_of(kind: str | Schema, raw: int | bytes) -> Any:
    """Return the value of a field from what stands in the message."""
    if kind == "int":
        if not isinstance(raw, int):
            raise BadRequest("the request is not a message of the protocol: a field has bytes in place of a number")
        return raw - TWO_64 if raw >= TWO_64 // 2 else raw
    data = as_bytes(raw)
    if not isinstance(kind, str):
        return decode(kind, data)
    try:
        if kind == "double":
            return struct.unpack("<d", data)[0]
        return data.decode() if kind == "text" else data
    except (UnicodeDecodeError, struct.error) as error:
        raise BadRequest(f"the request is not a message of the protocol: {error}") from None


def read_fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield the number, the wire type, and the number or the bytes of each field."""
    place = 0
    while place < len(data):
        key, place = read_varint(data, place)
        wire_type = key & 7
        if wire_type == VARINT:
            number, place = read_varint(data, place)
            yield key >> 3, wire_type, number
            continue
        if wire_type == LENGTH:
            size, place = read_varint(data, place)
        elif wire_type in FIXED:
            size = FIXED[wire_type]
        else:
            raise BadRequest(f"the request is not a message of the protocol: it has the wire type {wire_type}")
        if place + size > len(data):
            raise BadRequest("the request is not a message of the protocol: it ends too early")
        yield key >> 3, wire_type, data[place : place + size]
        place += size


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the number that begins at a place, and the place after it."""
    number = shift = 0
    while shift < 70 and place < len(data):
        byte = data[place]
        number |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return number % TWO_64, place
        shift += 7
    raise BadRequest("the request is not a message of the protocol: a number has no end")


def read_packed(data: bytes) -> Iterator[int]:
    """Yield the numbers of a list that is written as one field."""
    place = 0
    while place < len(data):
        number, place = read_varint(data, place)
        yield number


def encode(schema: Schema, message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes; fields that it lacks are left out."""
    result = bytearray()
    for number, field in schema.items():
        if (value := message.get(field.name)) is None:
            continue
        if field.map:
            values = [{"key": key, "value": entry} for key, entry in value.items()]
        else:
            values = list(value) if field.many else [value]
        for single in values:
            result += encode_field(number, field.kind, single)
    return bytes(result)


def encode_field(number: int, kind: str | Schema, value: Any) -> bytes:
    """Return one field as bytes."""
    wire_type = WIRE_TYPES.get(kind, LENGTH) if isinstance(kind, str) else LENGTH
    key = varint(number << 3 | wire_type)
    if kind == "int":
        return key + varint(int(value) % TWO_64)
    if kind == "double":
        return key + struct.pack("<d", value)
    data = encode(kind, value) if not isinstance(kind, str) else value.encode() if kind == "text" else bytes(value)
    return key + varint(len(data)) + data


def varint(number: int) -> bytes:
    """Return a number as bytes of 7 bits each."""
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)
