"""Words of a shell script with the values of its variables: quotes, `$NAME`, `${NAME:-default}`, arrays, arithmetic."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from rlhf_suite.errors import UserError
from rlhf_suite.migrate.shell_text import VARIABLE, foreign, is_open, variable, whole_number
from rlhf_suite.migrate.shell_words import OPENER, Word, end_of

MAX_VALUE = 2**20  # characters that all values of a script together may have
MAX_BRACES = 200
MAX_ARITHMETIC = 200  # characters
MAX_CUT = 1000  # characters of a text of which a part is taken
LARGEST = 2**63
PARAMETER = re.compile(r"(#?)(\w+|[@*?$!#-])(?:\[([^\]]*)\])?(?:(:?[-=+?]|##?|%%?)(.*))?", re.DOTALL)
BRACES = re.compile(r"\{([^'\"$\\`{}\s]*(?:,|\.\.)[^'\"$\\`{}\s]*)\}")
PIECE = re.compile(r"\\(.)|(\$(?:[A-Za-z_]\w*|[\d@*?$!#-]))", re.DOTALL)
TEXT = re.compile(r"[^\\'\"`$<>]+|[<>$]")
LITERAL_IN_QUOTES = ("'", "$'", "<(", ">(")
ALL_OF_ARRAY = re.compile(r"\$(?:@|\{(?:\w+\[@\]|@)\})")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "0": ""}
OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # A shell rounds towards zero, and a remainder has the sign of what is divided.
    ast.FloorDiv: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
    ast.Mod: lambda left, right: abs(left) % abs(right) * (-1 if left < 0 else 1),
}


@dataclass(frozen=True)
class Value:
    """What a variable has: one text, or those of an array; and what is uncertain about it."""

    texts: tuple[str, ...]
    is_array: bool = False
    notes: tuple[str, ...] = ()
    has_quotes: bool = False  # as those of a here-document, which mean what they would in a command


@dataclass(frozen=True)
class Piece:
    """A part of a resolved word: `is_split` where blanks in it part words, `breaks` before each further one of an
    array."""

    text: str
    is_split: bool = False
    breaks: bool = False


@dataclass
class Scope:
    """The variables of a script. Notes say what is uncertain in the texts that were resolved since they were taken."""

    known: dict[str, Value] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)  # variables that cannot be followed, and why
    notes: list[str] = field(default_factory=list)
    written: int = 0

    def take_notes(self) -> tuple[str, ...]:
        notes, self.notes = tuple(dict.fromkeys(self.notes)), []
        return notes

    def fields(self, word: Word) -> list[str]:
        """Return the words that a word stands for."""
        return [text for raw in braces(word.raw) for text in split(self.pieces(raw, word.line))]

    def text(self, raw: str, line: int, is_quoted: bool = False) -> str:
        """Return what a word stands for, as one text."""
        return "".join(f" {piece.text}" if piece.breaks else piece.text for piece in self.pieces(raw, line, is_quoted))

    def pieces(self, raw: str, line: int, is_quoted: bool = False) -> Iterator[Piece]:
        """Yield the parts of a word, without its quotes. `is_quoted`: it is within double quotes."""
        at = 0
        while at < len(raw):
            opener = OPENER.match(raw, at)
            if opener is not None and not (is_quoted and opener[0] in LITERAL_IN_QUOTES):
                end = end_of(raw, at)
                pieces = self.expand_opener(opener[0], raw[at:end], line, is_quoted)
            elif (piece := PIECE.match(raw, at)) is not None:
                end, pieces = piece.end(), self.simple(piece, line, is_quoted)
            else:
                plain = TEXT.match(raw, at)
                end = at + 1 if plain is None else plain.end()
                pieces = iter([Piece(raw[at:end])])
            at = end
            for next_piece in pieces:
                yield self.count_piece(next_piece, line)

    def count_piece(self, piece: Piece, line: int) -> Piece:
        """Return a piece, if all that was written before it leaves room.

        Raises:
            UserError: the values of the script grow without reason.
        """
        self.written += len(piece.text)
        if self.written > MAX_VALUE:
            problem = f"the variables of the script grow beyond {MAX_VALUE} characters"
            raise UserError(f"line {line}: {problem}; give the command with its values")
        return piece

    def simple(self, match: re.Match[str], line: int, is_quoted: bool) -> Iterator[Piece]:
        """Yield what a backslash or `$NAME` stands for."""
        if match[2] is not None:
            yield from self.parameter(match[2][1:], line, is_quoted)
        elif match[1] is not None and match[1] != "\n":
            is_kept = is_quoted and match[1] not in '"\\$`'
            yield Piece(f"\\{match[1]}" if is_kept else match[1])

    def expand_opener(self, opener: str, raw: str, line: int, is_quoted: bool) -> Iterator[Piece]:
        """Yield what quotes or an expansion stand for."""
        inside = raw[len(opener) : -1]
        if opener == "'":
            yield Piece(inside)
        elif opener == "$'":
            yield Piece(re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), inside, flags=re.DOTALL))
        elif opener == '"':
            if not ALL_OF_ARRAY.fullmatch(inside):  # which is not a word at all where the array is empty
                yield Piece("")
            yield from self.pieces(inside, line, is_quoted=True)
        elif opener == "${":
            yield from self.parameter(inside, line, is_quoted)
        elif raw.startswith("$((") and raw.endswith("))"):
            yield Piece(self.calculate(raw[3:-2], line))
        else:
            yield Piece(foreign(raw))

    def parameter(self, expression: str, line: int, is_quoted: bool) -> Iterator[Piece]:
        """Yield the value of `${expression}`: its default, a part of it, or its mark if the script does not tell."""
        match = PARAMETER.fullmatch(expression)
        if match is None:
            yield Piece(foreign(f"${{{expression}}}"))
            return
        counts, name, index, sign, argument = match.groups(default="")
        value = self.look_up(name, index, line)
        if sign.strip(":") in ("-", "=", "+") and sign:
            is_set = value is not None and (not sign.startswith(":") or any(value.texts))
            if is_set == (sign[-1] == "+"):
                yield from self.default(name, sign, argument, line, is_quoted)
                return
            if sign[-1] == "+":
                return
        if value is None:
            yield self.mark_missing(name, name if sign.endswith("?") and sign else expression)
        elif counts:
            yield Piece(str(size_of(value)))
        else:
            self.notes += value.notes
            pattern = self.text(argument, line) if sign and sign[0] in "#%" else ""
            is_joined = is_quoted and "*" in (name, index)
            yield from parts_of(value, sign if pattern else "", pattern, is_quoted, is_joined)

    def default(self, name: str, sign: str, argument: str, line: int, is_quoted: bool) -> list[Piece]:
        """Return the text of `${name:-text}`, which `:=` also gives the variable."""
        pieces = list(self.pieces(argument, line, is_quoted))
        if sign[-1] == "=":
            self.known[name] = Value(("".join(piece.text for piece in pieces),))
        return pieces

    def look_up(self, name: str, index: str, line: int) -> Value | None:
        """Return the value of a variable, or of an item of an array; None if it is not known."""
        value = self.known.get(name)
        if value is None and name.isdigit() and "@" in self.known:  # a function was given fewer arguments
            return Value(("",))
        if value is None or index in ("@", "*"):
            return value
        place = index or "0"
        if value.is_array and name not in ("@", "*"):
            number = whole_number(self.calculate(place, line))
            if number is None:
                return None
            texts = value.texts[number:][:1] if number >= -len(value.texts) else ()  # -1 is the last item
            return Value(texts or ("",), notes=value.notes)
        return value if place == "0" or name in ("@", "*") else None

    def mark_missing(self, name: str, expression: str) -> Piece:
        """Return the mark of a variable that the script does not set."""
        if name.isdigit() or name in ("@", "*"):
            self.notes.append(f"${name}: the arguments of the script are not known; write them out")
        elif name not in ALWAYS and name not in self.known:  # of an array that is known, an item may not be
            unset = f"${name} is not set by the script; it has to be set before the new command"
            self.notes.append(self.outside.get(name, unset))
        return Piece(variable(expression) if name.isidentifier() or name.isdigit() else foreign(f"${name}"))

    def calculate(self, expression: str, line: int) -> str:
        """Return the value of whole-number arithmetic, or its mark."""
        text = VARIABLE.sub(r"\1", self.text(expression, line))
        text = re.sub(r"[A-Za-z_]\w*", lambda name: self.number(name[0]), text)
        try:
            return str(result_of(text))
        except (ArithmeticError, SyntaxError, ValueError, RecursionError, MemoryError):
            for name in re.findall(r"[A-Za-z_]\w*", text):
                self.mark_missing(name, name)
            return variable(f"(({' '.join(text.split())}))")

    def number(self, name: str) -> str:
        """Return the value of a name in arithmetic, where it needs no dollar sign."""
        value = self.known.get(name)
        if value is None:
            return name
        self.notes += value.notes
        return value.texts[0] if value.texts else "0"


ALWAYS = ("HOME", "USER", "PWD", "TMPDIR", "HOSTNAME")  # every shell has them


def parts_of(value: Value, sign: str, pattern: str, is_quoted: bool, is_joined: bool) -> Iterator[Piece]:
    """Yield the texts of a value, each without what a pattern matches; `is_joined`: as one word."""
    if value.has_quotes and not is_quoted:
        yield from (Piece(text, breaks=place > 0) for place, text in enumerate(words_of(value.texts[0])))
        return
    for place, text in enumerate(value.texts):
        if place and is_joined:
            yield Piece(" ")
        cut = without(text, sign, pattern) if sign else text
        yield Piece(cut, is_split=not is_quoted, breaks=place > 0 and not is_joined)


def words_of(text: str) -> list[str]:
    """Return the words of a text with quotes; parted at blanks alone if a quote has no end."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def size_of(value: Value) -> int:
    """Return how many items an array has, or how many characters a text."""
    return len(value.texts) if value.is_array else len(value.texts[0])


def result_of(text: str) -> int:
    """Return the value of an expression of whole numbers.

    Raises:
        ValueError, ArithmeticError, SyntaxError: it is something else, or leaves the numbers that a shell knows.
    """
    if len(text) > MAX_ARITHMETIC or "**" in text:
        raise ValueError(text)

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            result = node.value
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            result = -value(node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            result = OPERATIONS[type(node.op)](value(node.left), value(node.right))
        else:
            raise ValueError(text)
        if abs(result) >= LARGEST:
            raise ValueError(text)
        return result

    return value(ast.parse(text.strip().replace("/", "//"), mode="eval").body)


def without(text: str, sign: str, pattern: str) -> str:
    """Return a text without what a pattern matches at its beginning (# or ##, the longest) or end (% or %%)."""
    if is_open(text) or is_open(pattern) or len(text) > MAX_CUT or len(pattern) > MAX_CUT:
        return foreign(f"{text}{sign}{pattern}")
    lengths = range(len(text) + 1) if len(sign) == 1 else range(len(text), -1, -1)
    for length in lengths:
        part = text[:length] if sign[0] == "#" else text[len(text) - length :]
        if fnmatchcase(part, pattern):
            return text[length:] if sign[0] == "#" else text[: len(text) - length]
    return text


def first_braces(raw: str) -> re.Match[str] | None:
    """Return the first braces outside of quotes and expansions; None if there are none."""
    at = 0
    while "{" in raw[at:]:
        if (match := BRACES.match(raw, at)) is not None:
            return match
        if OPENER.match(raw, at) is not None:
            at = end_of(raw, at)
        else:
            at += 2 if raw[at] == "\\" else 1
    return None


def braces(raw: str) -> list[str]:
    """Return the words that `a{b,c}` or `{1..3}` stands for."""
    match = first_braces(raw)
    if match is None:
        return [raw]
    first, _, last = match[1].partition("..")
    if re.fullmatch(r"-?\d{1,9}", first) and re.fullmatch(r"-?\d{1,9}", last):
        step = 1 if int(first) <= int(last) else -1
        numbers = range(int(first), int(last) + step, step)
        inside = [str(number) for number in numbers[: MAX_BRACES + 1]]
    else:
        inside = match[1].split(",")
    rest = braces(raw[match.end() :])
    if len(inside) < 2 or len(inside) * len(rest) > MAX_BRACES:
        return [raw]
    return [f"{raw[: match.start()]}{middle}{after}" for middle in inside for after in rest]


def split(pieces: Iterator[Piece]) -> Iterator[str]:
    """Yield the words that the parts of a word make: blanks of unquoted values part them."""
    word: str | None = None
    for piece in pieces:
        if piece.breaks and word is not None:
            yield word
            word = None
        if not piece.is_split:
            word = (word or "") + piece.text
            continue
        parts = re.split(r"\s+", piece.text)
        if parts and parts[0]:
            word = (word or "") + parts[0]
        for part in parts[1:]:
            if word is not None:
                yield word
            word = part or None
    if word is not None:
        yield word
