"""Check the functions of a program from another process, so that the program cannot decide the outcome itself.

`serve` runs a program and then calls its functions on request. `check` executes the checks and sends those requests.
`jail.py` runs each of the two in a separate sandbox, with two pipes between them. The jail gets the text of this file,
so this file imports nothing of the suite.

The checks see plain values, rebuilt from JSON: None, numbers, texts, bytes, lists, tuples, sets, dicts, ranges, arrays.
Any other value of the program (a class, an instance, a generator) is a `RemoteObject`. The checks can call it, read its
attributes and items, and iterate over it, but it is equal to nothing: if the program did the comparison, an object that
is equal to everything would pass. The program can call functions of the checks (a key, a callback) and do nothing else
with them, because all of Python can be reached from the attributes of a function.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

Refer = Callable[[object], list[Any]]  # makes the reference that is sent for a value that is not plain
Known = Callable[[str, int], object]  # the inverse
PLAIN = (str, bool, int, float)
Kind = tuple[
    Callable[[Any], bool], Callable[[Any], list[Any]], Callable[[list[Any]], Any]
]  # a test of the type, taking apart, putting together


def number(kind: type[Any]) -> Kind:
    """Return how a number or text is sent: as itself."""
    return (lambda value: isinstance(value, kind)), (lambda value: [kind(value)]), (lambda parts: kind(*parts))


def container(kind: type[Any]) -> Kind:
    """Return how a container is sent: as the list of its items."""
    return (lambda value: isinstance(value, kind)), list, kind


def write_kind(kind: type[Any]) -> Kind:
    """Return how an exact number is sent: as its digits."""
    return (lambda value: isinstance(value, kind)), (lambda value: [str(value)]), (lambda parts: kind(str(*parts)))


def from_iso(kind: type[Any]) -> Callable[[list[Any]], Any]:
    """Return how a date is put together from its text."""
    return lambda parts: kind.fromisoformat(*parts)


# How the other plain values, subclasses included, are taken apart and put together.
KINDS: dict[str, Kind] = {
    **{kind.__name__: number(kind) for kind in (int, float, str)},
    **{kind.__name__: container(kind) for kind in (list, tuple, set, frozenset, deque)},
    "dict": (
        lambda value: isinstance(value, dict),
        lambda value: [part for pair in value.items() for part in pair],
        lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    ),
    "bytes": (
        lambda value: isinstance(value, bytes | bytearray),
        lambda value: [value.hex()],
        lambda parts: bytes.fromhex(*parts),
    ),
    "complex": (
        lambda value: isinstance(value, complex),
        lambda value: [value.real, value.imag],
        lambda parts: complex(*parts),
    ),
    **{kind.__name__: write_kind(kind) for kind in (Fraction, Decimal)},
    "datetime": (lambda value: isinstance(value, datetime), lambda value: [value.isoformat()], from_iso(datetime)),
    "date": (lambda value: isinstance(value, date), lambda value: [value.isoformat()], from_iso(date)),
    "range": (
        lambda value: isinstance(value, range),
        lambda value: [value.start, value.stop, value.step],
        lambda parts: range(*parts),
    ),
    "array": (  # or one of its numbers
        lambda value: type(value).__module__ == "numpy" and hasattr(value, "tolist"),
        lambda value: [value.tolist()],
        lambda parts: importlib.import_module("numpy").array(*parts)[()],
    ),
}
# Modules that checks may use without an import, by the name that they have in the checks.
MODULES = {name: name for name in sys.stdlib_module_names} | {"np": "numpy", "numpy": "numpy"}
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **named: function(*args, **named),
    "name": lambda names, name: names[name],
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "len": len,
    "iter": list,
    "next": next,
    "str": str,
}


def encode(value: Any, refer: Refer) -> Any:
    """Return a value as JSON. A subclass of a plain type becomes that type."""
    if value is None or type(value) in PLAIN:
        return value
    for kind, (is_one, parts, _) in KINDS.items():
        if is_one(value):
            return [kind, [encode(part, refer) for part in parts(value)]]
    return refer(value)


def decode(encoded: Any, known: Known) -> Any:
    """Return the value of what `encode` made. It makes only plain types, whatever it is given."""
    if not isinstance(encoded, list):
        return encoded
    kind, value = encoded
    if kind not in KINDS:
        return known(kind, int(value))
    return KINDS[kind][2]([decode(part, known) for part in value])


class Channel:
    """Sends requests and replies to the other side, and keeps our values that the other side knows by number."""

    def __init__(
        self, fds: tuple[int, int], ours: str, theirs: Callable[[Channel, int], object], allowed: Collection[str]
    ) -> None:
        """Open the two pipes.

        Args:
            fds: the descriptors to read from and to write to.
            ours: the name of this side.
            theirs: makes the object that stands here for a value of the other side.
            allowed: the operations that the other side may request.
        """
        self.reader, self.writer = os.fdopen(fds[0], "rb"), os.fdopen(fds[1], "wb")
        self.ours, self.theirs, self.allowed = ours, theirs, allowed
        self.values: list[object] = []

    def refer(self, value: object) -> list[Any]:
        """Keep a value of ours and return its reference; a remote object has the reference of the other side."""
        if isinstance(value, RemoteObject):
            return ["program", value._number]
        self.values.append(value)
        return [self.ours, len(self.values) - 1]

    def look_up(self, kind: str, number: int) -> object:
        """Return the value of a reference: ours itself, or what stands for one of the other side."""
        return self.values[number] if kind == self.ours else self.theirs(self, number)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message as a line of JSON."""
        self.writer.write(json.dumps(message).encode() + b"\n")
        self.writer.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next message; raise EOFError when the other side has ended."""
        line = self.reader.readline()
        if not line:
            raise EOFError("the program ended before its tests did")
        message = json.loads(line)
        return message if isinstance(message, dict) else {}

    def ask(self, operation: str, target: int, *args: Any, **named: Any) -> Any:
        """Request `operation` on a value of the other side and return its result.

        While it works, the other side may send requests too. Changes to lists, dicts and sets are copied back to ours.
        """
        given = [encode(arg, self.refer) for arg in args]
        options = {name: encode(value, self.refer) for name, value in named.items()}
        self.send({"do": operation, "to": target, "args": given, "named": options})
        while "do" in (reply := self.receive()):
            self.answer(reply)
        for mine, changed in zip(args, reply.get("args", ()), strict=False):
            refill(mine, decode(changed, self.look_up))
        if "error" in reply:
            name, text = reply["error"]
            kind = getattr(builtins, name, None)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(text)
        return decode(reply.get("value"), self.look_up)

    def answer(self, request: dict[str, Any]) -> None:
        """Carry out a request of the other side and send the reply."""
        if request["do"] not in self.allowed:
            raise PermissionError(request["do"])
        args = [decode(value, self.look_up) for value in request["args"]]
        named = {name: decode(value, self.look_up) for name, value in request["named"].items()}
        reply: dict[str, Any] = {}
        try:
            value = OPERATIONS[request["do"]](self.values[request["to"]], *args, **named)
            reply["value"] = encode(value, self.refer)
        except Exception as error:
            reply["error"] = [type(error).__name__, str(error)]
        reply["args"] = [encode(arg, self.refer) if isinstance(arg, list | dict | set) else None for arg in args]
        self.send(reply)


def refill(mine: Any, changed: Any) -> None:
    """Replace the contents of a list, dict or set by those of another of the same type."""
    if isinstance(mine, list) and isinstance(changed, list):
        mine[:] = changed
    elif isinstance(mine, dict | set) and type(mine) is type(changed):
        mine.clear()
        mine.update(changed)


class RemoteObject:
    """Stands for a value of the program, which stays in the program's process."""

    __slots__ = ("_channel", "_number")

    def __init__(self, channel: Channel, number: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._channel.ask("call", self._number, *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # with these, the program could pose as an array, a number or a path to libraries
            raise AttributeError(name)
        return self._channel.ask("getattr", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.ask("setattr", self._number, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._channel.ask("getitem", self._number, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._channel.ask("setitem", self._number, key, value)

    def __len__(self) -> int:
        return int(self._channel.ask("len", self._number))

    def __iter__(self) -> Any:
        return iter(self._channel.ask("iter", self._number))

    def __next__(self) -> Any:
        return self._channel.ask("next", self._number)

    def __str__(self) -> str:
        return str(self._channel.ask("str", self._number))


def serve(program: str, read_fd: int, write_fd: int) -> None:
    """Run the program, then carry out requests until the other side closes its pipe."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(program, "program.py", "exec"), names)
    channel = Channel((read_fd, write_fd), "program", callback, OPERATIONS)
    channel.values.append(names)
    channel.send({"ready": True})
    with suppress(EOFError):
        while True:
            channel.answer(channel.receive())


def callback(channel: Channel, number: int) -> object:
    """Return what the program gets for a function of the checks: a function that calls it over there."""
    return lambda *args, **named: channel.ask("call", number, *args, **named)


def check(checks: list[str], read_fd: int, write_fd: int) -> None:
    """Execute the checks. Names that they do not define come from the program. An exception means that they failed."""
    channel = Channel((read_fd, write_fd), "checks", RemoteObject, ["call"])
    channel.receive()  # the program ran to its end
    names: dict[str, object] = {}
    for name in free_names(checks):
        names[name] = importlib.import_module(MODULES[name]) if name in MODULES else channel.ask("name", 0, name)
    for text in checks:
        exec(compile(text, "check.py", "exec"), names)


def free_names(checks: list[str]) -> list[str]:
    """Return the names that the checks use and do not define, without builtins."""
    used, made = dict[str, None](), set(dir(builtins))
    for node in (node for check in checks for node in ast.walk(ast.parse(check))):
        if isinstance(node, ast.Name):
            used[node.id] = None
            made |= set() if isinstance(node.ctx, ast.Load) else {node.id}
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
    return [name for name in used if name not in made]
