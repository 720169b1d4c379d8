"""The text of a shell script as words, operators and redirections: quotes, expansions and here-documents have ends.

Each character is read once. What a script could do to a reader is bounded here: its length, and how deep quotes and
expansions are nested.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlhf_suite.errors import UserError

MAX_CHARACTERS = 2**18
MAX_DEPTH = 40
# What opens a quote or an expansion, and its kind; then what ends or opens something within each kind.
OPENERS = {"'": "'", '"': '"', "`": "`", "$'": "$'", "$(": "(", "(": "(", "${": "{", "<(": "(", ">(": "("}
CLOSERS = {"'": "'", '"': '"', "`": "`", "$'": "'", "(": ")", "{": "}"}
WITHIN = {
    "'": re.compile("'"),
    "$'": re.compile(r"\\.|'", re.DOTALL),
    "`": re.compile(r"\\.|`", re.DOTALL),
    '"': re.compile(r'\\.|"|`|\$\(|\$\{', re.DOTALL),
    "(": re.compile(r"\\.|\$'|['\"`()]|\$\(|\$\{", re.DOTALL),
    "{": re.compile(r"\\.|\$'|['\"`}]|\$\(|\$\{", re.DOTALL),
}
OPENER = re.compile(r"\$['({]|[<>]\(|['\"`]")
PLAIN = re.compile(r"(?:[^\s\\'\"`$;&|()<>]|\$(?!['({]))+")
BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
COMMENT = re.compile(r"#[^\n]*")
PLACEHOLDER = re.compile(r"<[A-Za-z][\w ./-]*>")  # <model>, as documentation has it
OPERATOR = re.compile(r"\n|;;&|;;|;&|;|&&|&(?!>)|\|\||\|&|\||\(|\)")
REDIRECTION = re.compile(r"\d*(?:<<-|<<<|<<|<&|<>|<|>>|>&|>\||>)|&>>|&>")
ARRAY = re.compile(r"\w+\+?=")
MAX_ARITHMETIC = 400  # characters of an arithmetic command


@dataclass(frozen=True)
class Word:
    """A word as it is written, quotes and all. `items` are those of an array, `NAME=(...)`."""

    raw: str
    line: int
    items: tuple[Word, ...] | None = None


@dataclass(frozen=True)
class Operator:
    """What ends a command or begins a group: `;`, `&&`, `(`, the end of a line, ..."""

    text: str
    line: int


@dataclass
class Redirection:
    """`> file`, or a here-document with its text, in which variables are replaced unless its name is quoted."""

    operator: str
    target: Word | None
    line: int
    body: str | None = None
    is_expanded: bool = True


Token = Word | Operator | Redirection


@dataclass
class Reader:
    """The place that a text has been read to, and the here-documents whose text begins at the next line."""

    text: str
    first_line: int = 1
    at: int = 0
    documents: list[Redirection] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARACTERS:
            problem = f"the script has {len(self.text)} characters, and at most {MAX_CHARACTERS} are read"
            raise UserError(f"line {self.first_line}: {problem}; give the part with the command")
        self.newlines = [place for place, sign in enumerate(self.text) if sign == "\n"]

    def line(self, place: int | None = None) -> int:
        return self.first_line + bisect_right(self.newlines, (self.at if place is None else place) - 1)

    def take(self, pattern: re.Pattern[str]) -> str | None:
        """Read what a pattern matches here; None if it does not match."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def tokens(self) -> Iterator[Token]:
        """Yield all tokens.

        Raises:
            UserError: a quote or an expansion has no end, or there are too many within each other.
        """
        while True:
            self.take(BLANK)
            if self.at >= len(self.text):
                return
            if self.take(COMMENT) is None:
                yield self.token()

    def token(self) -> Token:
        line = self.line()
        if self.text.startswith("((", self.at):
            start, end = self.at, self.text.find("))", self.at, self.at + MAX_ARITHMETIC)
            if end > 0 and "\n" not in self.text[start:end]:
                self.at = end + 2
                return Word(self.text[start : self.at], line)
        if not self.begins_word():
            if (operator := self.take(REDIRECTION)) is not None:
                return self.redirection(operator, line)
            if (text := self.take(OPERATOR)) is not None:
                if text == "\n":
                    self.read_documents()
                return Operator(text, line)
        return self.word()

    def begins_word(self) -> bool:
        """Return whether what looks like a redirection is a word: `<(...)`, or a placeholder of a documentation."""
        return self.text.startswith(("<(", ">("), self.at) or PLACEHOLDER.match(self.text, self.at) is not None

    def redirection(self, operator: str, line: int) -> Redirection:
        self.take(BLANK)
        is_word = self.at < len(self.text) and OPERATOR.match(self.text, self.at) is None
        redirection = Redirection(operator, self.word() if is_word else None, line)
        if operator in ("<<", "<<-") and redirection.target is not None:
            redirection.is_expanded = not set(redirection.target.raw) & set("\"'\\")
            self.documents.append(redirection)
        return redirection

    def read_documents(self) -> None:
        """Read the here-documents that the line before named."""
        for document in self.documents:
            assert document.target is not None
            name = document.target.raw.strip("\"'\\")
            body = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                row, self.at = self.text[self.at : end], end + 1
                if row.strip() == name:
                    break
                body.append(row)
            document.body = "\n".join(body)
        self.documents = []

    def word(self) -> Word:
        """Read a word up to the next blank or operator outside of quotes."""
        start, line = self.at, self.line()
        if self.take(PLACEHOLDER) is None:
            while self.at < len(self.text) and self.part():
                pass
        raw = self.text[start : self.at]
        if ARRAY.fullmatch(raw) and self.text.startswith("(", self.at):
            end = end_of(self.text, self.at, self)
            inner = Reader(self.text[self.at + 1 : end - 1], self.line())
            self.at = end
            return Word(raw, line, tuple(token for token in inner.tokens() if isinstance(token, Word)))
        if not raw:  # a sign that means nothing here
            self.at += 1
            raw = self.text[start : self.at]
        return Word(raw, line)

    def part(self) -> bool:
        """Read a part of a word; return whether there was one."""
        if self.take(PLAIN) is not None:
            return True
        if self.text.startswith("\\", self.at):
            is_continued = self.text.startswith(("\\\n", "\\\r\n"), self.at)
            self.at += 0 if is_continued else 2
            return not is_continued
        if OPENER.match(self.text, self.at) is None:
            return False
        self.at = end_of(self.text, self.at, self)
        return True


def end_of(text: str, start: int, reader: Reader | None = None) -> int:
    """Return the place after the quote or expansion that begins at `start`.

    Raises:
        UserError: it has no end, or too many are within each other.
    """
    place = "" if reader is None else f"line {reader.line(start)}: "
    opener = next(sign for sign in sorted(OPENERS, key=len, reverse=True) if text.startswith(sign, start))
    kinds, at = [OPENERS[opener]], start + len(opener)
    while kinds:
        match = WITHIN[kinds[-1]].search(text, at)
        if match is None:
            raise UserError(f"{place}{text[start : start + 20]!r} is opened and never closed; add {CLOSERS[kinds[-1]]}")
        at = match.end()
        if match[0] == CLOSERS[kinds[-1]]:
            kinds.pop()
        elif match[0] in OPENERS:
            kinds.append(OPENERS[match[0]])
        if len(kinds) > MAX_DEPTH:
            raise UserError(f"{place}more than {MAX_DEPTH} quotes or expansions are within each other; write the value")
    return at
