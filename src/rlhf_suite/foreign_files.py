"""Files of run folders and configurations, which others may have written, cut off or made to do harm.

All that reads such a file does it here: only regular files are opened (a pipe or a device would never end), and what is
read is bounded in bytes, depth and number of values. Whatever is wrong is one sentence, `DamagedFile`.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, TYPE_CHECKING, Any, get_args, get_origin

from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig
    from pyarrow.parquet import ParquetFile

MIB = 2**20
JSON_BYTES, YAML_BYTES, LINES_BYTES, LINE_BYTES = 64 * MIB, MIB, 1024 * MIB, 16 * MIB
END_BYTES = 1024  # of the last line that was read, by which a file is known again
YAML_VALUES, DEPTH = 20_000, 50
PARQUET_ROWS = 10_000_000
ANY_SIZE = 1 << 62  # bytes
LARGEST = 2**53  # of a number in JSON
# What libraries raise for contents that they cannot read.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class DamagedFile(UserError):
    """A file that is not what it should be. The message names it and what is wrong."""


def open_regular(path: Path, limit: int, follow: bool = False) -> IO[bytes]:
    """Open a regular file of at most `limit` bytes. `follow`: also at the end of a link, for files that the user names.

    Raises:
        DamagedFile: it is something else, larger, or cannot be read.
    """
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        file = os.fdopen(os.open(path, flags), "rb")
    except OSError as error:
        is_link = error.errno == errno.ELOOP and path.is_symlink()
        reason = "it is a link; put the file itself there" if is_link and not follow else error.strerror
        raise DamagedFile(f"{path} cannot be read: {reason}") from None
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise DamagedFile(f"{path} cannot be read: it is not a regular file")
    if status.st_size > limit:
        file.close()
        raise DamagedFile(f"{path} cannot be read: it has {status.st_size / MIB:.0f} MiB, more than {limit / MIB:.0f}")
    return file


def content(path: Path, limit: int, follow: bool = False) -> bytes:
    """Return the bytes of a file, at most `limit`. Raises DamagedFile."""
    with open_regular(path, limit, follow) as file:
        try:
            return file.read(limit)  # one that grows, or has no size as those in /proc, does not go on for ever
        except OSError as error:  # a folder, a disk that fails
            raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """Return the value in a file of JSON. Numbers that JSON does not have (NaN) are None. Raises DamagedFile."""
    try:
        return parse_json(content(path, limit))
    except DamagedFile:
        raise
    except UNREADABLE:
        raise DamagedFile(f"{path} is damaged: it is not JSON") from None


def read_table(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table in a file of JSON, in which each of `fields` that is there has its type. Raises DamagedFile."""
    return check_types(read_json(path), fields, path)


def check_types(value: Any, fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a value that was read from `path`, if it is a table as `read_table` returns it. Raises DamagedFile."""
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} is damaged: it does not hold a table")
    for name, wanted in fields.items():
        if name in value and not has_type(value[name], wanted):
            raise DamagedFile(f"{path} is damaged: its {name} is of another type than {name_type(wanted)}")
    return value


def parse_json(text: bytes) -> Any:
    """Return the value of a text of JSON; numbers that JSON does not have, and those beyond floats, are None."""

    def number(digits: str) -> float | None:
        value = float(digits)
        return value if math.isfinite(value) else None

    return json.loads(text, parse_constant=lambda name: None, parse_float=number)


@dataclass
class Position:
    """How far a file of lines was read: bytes and lines. The file is known by its number on its disk, and by the end of
    the last line, because numbers are given again."""

    file: int | None = None
    offset: int = 0
    lines: int = 0
    end: bytes = b""

    def pass_line(self, size: int, end: bytes) -> int:
        """Go on after a line; return its number, from 1."""
        self.offset, self.lines, self.end = self.offset + size, self.lines + 1, end[-END_BYTES:]
        return self.lines

    def seek(self, file: IO[bytes]) -> None:
        """Have a file go on here. Raises ReplacedFile if it is not the one that was read."""
        number = os.fstat(file.fileno()).st_ino
        file.seek(self.offset - len(self.end))
        if self.file not in (None, number) or file.read(len(self.end)) != self.end:
            raise ReplacedFile
        self.file = number


class ReplacedFile(Exception):
    """A file has other lines than those that were read of it."""


def json_lines(path: Path, position: Position | None = None) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each complete line of a file of JSON lines; the value is None if it cannot be read.
    With a position only of the lines after it, and it goes on with them. Raises DamagedFile, ReplacedFile."""
    position = position or Position()
    with open_regular(path, LINES_BYTES) as file:
        position.seek(file)
        while line := file.readline(LINE_BYTES):
            if not line.endswith(b"\n"):
                if len(line) < LINE_BYTES:
                    return  # cut off by a kill
                size = len(line)
                while line and not line.endswith(b"\n"):
                    line = file.readline(LINE_BYTES)
                    size += len(line)
                yield position.pass_line(size, line), None
                continue
            number = position.pass_line(len(line), line)
            try:
                yield number, parse_json(line)
            except (ValueError, RecursionError):
                yield number, None


def has_type(value: Any, wanted: Any) -> bool:
    """Return whether a value of JSON has a type: one of its own, `dict[str, T]`, `list[T]`, `float` (also a whole
    number), None, a union, or Any."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is UnionType:
        return any(has_type(value, kind) for kind in inner)
    if origin is not None:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return isinstance(value, origin) and all(has_type(part, inner[-1]) for part in parts)
    if wanted in (int, float):
        kinds = int if wanted is int else int | float
        return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < LARGEST
    return wanted is Any or isinstance(value, wanted)


def name_type(wanted: Any) -> str:
    """Return a type as messages call it."""
    names = {str: "a text", int: "a whole number", float: "a number", NoneType: "null", bool: "true or false"}
    if get_origin(wanted) is UnionType:
        return " or ".join(map(name_type, get_args(wanted)))
    kinds = {dict: "a table", list: "a list"}
    return names.get(wanted) or kinds.get(get_origin(wanted) or wanted, "that")


def read_yaml(path: Path, follow: bool = False) -> DictConfig | ListConfig:
    """Return the content of a YAML file; its interpolations are not resolved. Raises DamagedFile."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    text = content(path, YAML_BYTES, follow)
    try:
        check_yaml(text.decode(), path)
        return OmegaConf.load(io.StringIO(text.decode()))
    except DamagedFile:
        raise
    except (YAMLError, OmegaConfBaseException, *UNREADABLE) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DamagedFile(f"{path} is not valid YAML: {reason}") from None


def check_yaml(text: str, path: Path) -> None:
    """Raise DamagedFile for YAML with tags, or that is deep or has many values once its aliases are in their places."""
    import yaml

    sizes, anchors = [0], dict[str, int]()  # values in each open collection, and in each that has a name
    names = list[str | None]()
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if getattr(event, "tag", None) is not None:
            line = event.start_mark.line + 1
            raise DamagedFile(f"{path}:{line}: the tag {event.tag} is not read; write the value without it")
        if isinstance(event, yaml.CollectionStartEvent):
            sizes.append(1)
            names.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            size, name = sizes.pop(), names.pop()
            sizes[-1] += size
            anchors |= {name: size} if name else {}
        elif isinstance(event, yaml.AliasEvent):
            sizes[-1] += anchors.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            sizes[-1] += 1
        if sum(sizes) > YAML_VALUES or len(sizes) > DEPTH:
            raise DamagedFile(f"{path} cannot be read: more than {YAML_VALUES:,} values, or more than {DEPTH} levels")


@contextmanager
def parquet(path: Path) -> Iterator[ParquetFile]:
    """Open a parquet file for the block. What cannot be read in the block is a DamagedFile."""
    from pyarrow.parquet import ParquetFile

    try:
        with open_regular(path, ANY_SIZE) as file, ParquetFile(file) as parquet:
            if parquet.metadata.num_rows > PARQUET_ROWS:
                raise DamagedFile(f"{path} cannot be read: it has more than {PARQUET_ROWS:,} rows")
            yield parquet
    except UserError:
        raise
    except (*UNREADABLE, MemoryError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DamagedFile(f"{path} is damaged or cut off: {reason}") from None
