"""Tests of functions in one process, the functions in another: what a program says of itself never decides.

`serve` runs a program and then calls its functions for `check`, which executes the checks. Both are run by `jail.py`,
each in a sandbox of its own, with two pipes between them; this file's text is what the jail gets, so it stands alone.

The checks see plain values: None, numbers, texts, bytes, lists, tuples, sets, dicts, ranges, arrays, rebuilt from JSON.
Anything else of the program's (a class, an instance, a generator) is an `Elsewhere`, which can be called, asked for
attributes and items, iterated, and is equal to nothing: if it were the program that compares, an object that is equal
to everything would pass. Functions of the checks (a key, a callback) are called back; the program can do no more with
them than that, since the rest of Python hangs on every function.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import operator
import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

Refer = Callable[[object], list[Any]]  # what stands for a value that is not plain
Known = Callable[[str, int], object]  # the inverse
PLAIN = (str, bool, int, float)
Kind = tuple[Callable[[Any], bool], Callable[[Any], list[Any]], Callable[[list[Any]], Any]]  # is it one, parts, whole


def number(kind: type[Any]) -> Kind:
    return (lambda value: isinstance(value, kind)), (lambda value: [kind(value)]), (lambda parts: kind(*parts))


def container(kind: type[Any]) -> Kind:
    return (lambda value: isinstance(value, kind)), list, kind


# How other plain values, subclasses included, are taken apart and put together.
KINDS: dict[str, Kind] = {
    **{kind.__name__: number(kind) for kind in (int, float, str)},
    **{kind.__name__: container(kind) for kind in (list, tuple, set, frozenset)},
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
# Modules that checks may use without importing them, by the name they have there.
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
    """A value as JSON; subclasses of plain types become those."""
    if value is None or type(value) in PLAIN:
        return value
    for kind, (is_one, parts, _) in KINDS.items():
        if is_one(value):
            return [kind, [encode(part, refer) for part in parts(value)]]
    return refer(value)


def decode(found: Any, known: Known) -> Any:
    """The inverse; makes plain types alone, whatever it is given."""
    if not isinstance(found, list):
        return found
    kind, value = found
    if kind not in KINDS:
        return known(kind, int(value))
    return KINDS[kind][2]([decode(part, known) for part in value])


class Line:
    """Requests and replies with the other side, and the values of ours that it knows by number."""

    def __init__(
        self, fds: tuple[int, int], ours: str, theirs: Callable[[Line, int], object], allowed: Collection[str]
    ) -> None:
        """`fds`: to read, to write. `ours`: the name of this side. `theirs` makes what stands for a value of the other
        side. `allowed`: what that may ask for."""
        self.reader, self.writer = os.fdopen(fds[0], "rb"), os.fdopen(fds[1], "wb")
        self.ours, self.theirs, self.allowed = ours, theirs, allowed
        self.values: list[object] = []

    def refer(self, value: object) -> list[Any]:
        if isinstance(value, Elsewhere):
            return ["program", value._number]
        self.values.append(value)
        return [self.ours, len(self.values) - 1]

    def known(self, kind: str, number: int) -> object:
        return self.values[number] if kind == self.ours else self.theirs(self, number)

    def send(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")
        self.writer.flush()

    def receive(self) -> dict[str, Any]:
        line = self.reader.readline()
        if not line:
            raise EOFError("the program ended before its tests did")
        message = json.loads(line)
        return message if isinstance(message, dict) else {}

    def ask(self, operation: str, target: int, *args: Any, **named: Any) -> Any:
        """Have `operation` done over there; meanwhile the other side may ask us. Lists, dicts and sets that it
        changed are changed here, too."""
        given = [encode(each, self.refer) for each in args]
        options = {name: encode(each, self.refer) for name, each in named.items()}
        self.send({"do": operation, "to": target, "args": given, "named": options})
        while "do" in (reply := self.receive()):
            self.answer(reply)
        for mine, changed in zip(args, reply.get("args", ()), strict=False):
            refill(mine, decode(changed, self.known))
        if "error" in reply:
            name, text = reply["error"]
            kind = getattr(builtins, name, None)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(text)
        return decode(reply.get("value"), self.known)

    def answer(self, request: dict[str, Any]) -> None:
        """Do what the other side asks for."""
        if request["do"] not in self.allowed:
            raise PermissionError(request["do"])
        args = [decode(each, self.known) for each in request["args"]]
        named = {name: decode(each, self.known) for name, each in request["named"].items()}
        reply: dict[str, Any] = {}
        try:
            value = OPERATIONS[request["do"]](self.values[request["to"]], *args, **named)
            reply["value"] = encode(value, self.refer)
        except Exception as error:
            reply["error"] = [type(error).__name__, str(error)]
        reply["args"] = [encode(each, self.refer) if isinstance(each, list | dict | set) else None for each in args]
        self.send(reply)


def refill(mine: Any, changed: Any) -> None:
    """Give a list, dict or set the contents of another."""
    if isinstance(mine, list) and isinstance(changed, list):
        mine[:] = changed
    elif isinstance(mine, dict | set) and type(mine) is type(changed):
        mine.clear()
        mine.update(changed)


class Elsewhere:
    """A value of the program's, which stays there."""

    __slots__ = ("_line", "_number")

    def __init__(self, line: Line, number: int) -> None:
        object.__setattr__(self, "_line", line)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._line.ask("call", self._number, *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # libraries would take its word for an array, a number, a path
            raise AttributeError(name)
        return self._line.ask("getattr", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._line.ask("setattr", self._number, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._line.ask("getitem", self._number, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._line.ask("setitem", self._number, key, value)

    def __len__(self) -> int:
        return int(self._line.ask("len", self._number))

    def __iter__(self) -> Any:
        return iter(self._line.ask("iter", self._number))

    def __next__(self) -> Any:
        return self._line.ask("next", self._number)

    def __str__(self) -> str:
        return str(self._line.ask("str", self._number))


def serve(program: str, read_fd: int, write_fd: int) -> None:
    """Run the program; then answer, until there are no more questions."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(program, "program.py", "exec"), names)
    line = Line((read_fd, write_fd), "program", callback, OPERATIONS)
    line.values.append(names)
    line.send({"ready": True})
    with suppress(EOFError):
        while True:
            line.answer(line.receive())


def callback(line: Line, number: int) -> object:
    """A function of the checks, for the program."""
    return lambda *args, **named: line.ask("call", number, *args, **named)


def check(checks: list[str], read_fd: int, write_fd: int) -> None:
    """Execute the checks; what they do not define themselves is the program's. An exception means that they failed."""
    line = Line((read_fd, write_fd), "checks", Elsewhere, ["call"])
    line.receive()  # the program ran to its end
    names: dict[str, object] = {}
    for name in free_names(checks):
        names[name] = importlib.import_module(MODULES[name]) if name in MODULES else line.ask("name", 0, name)
    for each in checks:
        exec(compile(each, "check.py", "exec"), names)


def free_names(checks: list[str]) -> list[str]:
    """The names that the checks use and do not make, builtins aside."""
    used, made = dict[str, None](), set(dir(builtins))
    for node in (node for each in checks for node in ast.walk(ast.parse(each))):
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
