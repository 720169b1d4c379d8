"""The commands of a shell script as a tree: simple commands, branches, loops, groups and functions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rlhf_suite.errors import UserError
from rlhf_suite.migrate.shell_words import MAX_DEPTH, Operator, Reader, Redirection, Token, Word

NAME = re.compile(r"[A-Za-z_][\w-]*")


@dataclass
class Simple:
    """A command with its words and redirections."""

    words: list[Word] = field(default_factory=list)
    redirections: list[Redirection] = field(default_factory=list)


@dataclass
class Branches:
    """`if` or `case`: bodies of which one runs at most; the last one always, if none before it does (`is_complete`)."""

    bodies: list[list[Node]]
    line: int
    is_complete: bool = False


@dataclass
class Loop:
    """`for` over words, or a loop of another kind (`words` None)."""

    body: list[Node]
    line: int
    name: str = ""
    words: list[Word] | None = None


@dataclass
class Function:
    """A function, which runs where it is called."""

    name: str
    body: list[Node]


Node = Simple | Branches | Loop | Function


def parse(text: str, first_line: int = 1) -> list[Node]:
    """Return the commands of a script.

    Raises:
        UserError: it is not one, or too long or too deeply nested to be one that somebody wrote.
    """
    parser = Parser(list(Reader(text, first_line).tokens()))
    nodes = parser.nodes(())
    if parser.at < len(parser.tokens):
        token = parser.tokens[parser.at]
        raise UserError(f"line {token.line}: {parser.word()!r} ends nothing; correct the script")
    return nodes


@dataclass
class Parser:
    """The place that the tokens have been read to."""

    tokens: list[Token]
    at: int = 0
    depth: int = 0

    def word(self) -> str:
        """The next word or operator as it is written; empty at the end, and for a redirection."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if isinstance(token, Word):
            return token.raw
        return token.text if isinstance(token, Operator) else ""

    def is_at(self, *words: str) -> bool:
        return self.at < len(self.tokens) and self.word() in words

    def skip(self, *words: str) -> None:
        """Read over one of these words.

        Raises:
            UserError: another one is here.
        """
        if not self.is_at(*words):
            raise UserError(f"line {self.line()}: {' or '.join(map(repr, words))} is expected; correct the script")
        self.at += 1

    def line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)].line

    def nodes(self, stops: tuple[str, ...]) -> list[Node]:
        """Return the commands up to one of the words that end them."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UserError(f"line {self.line()}: more than {MAX_DEPTH} loops and branches are within each other")
        nodes: list[Node] = []
        while self.at < len(self.tokens) and not self.is_at(*stops, *ENDS):
            if isinstance(self.tokens[self.at], Operator) and self.word() != "(":
                self.at += 1
            else:
                nodes += self.node()
        self.depth -= 1
        return nodes

    def node(self) -> list[Node]:
        """Return the command that begins here."""
        if isinstance(self.tokens[self.at], Word | Operator):
            if (read := COMPOUND.get(self.word())) is not None:
                return self.with_redirections(read(self))
            after = self.tokens[self.at + 1 : self.at + 3]
            if NAME.fullmatch(self.word()) and [getattr(token, "text", "") for token in after] == ["(", ")"]:
                return [self.function()]
        return [self.simple()]

    def with_redirections(self, nodes: list[Node]) -> list[Node]:
        """Read over the redirections after a compound command."""
        while self.at < len(self.tokens) and isinstance(self.tokens[self.at], Redirection):
            self.at += 1
        return nodes

    def simple(self) -> Simple:
        command = Simple()
        while self.at < len(self.tokens) and not isinstance(token := self.tokens[self.at], Operator):
            if isinstance(token, Word):
                command.words.append(token)
            else:
                command.redirections.append(token)
            self.at += 1
        if not (command.words or command.redirections):
            self.at += 1
        return command

    def branches(self) -> list[Node]:
        """Read `if ...; then ...; elif ...; else ...; fi`."""
        line, conditions, bodies = self.line(), list[Node](), list[list[Node]]()
        self.skip("if")
        while True:
            conditions += self.nodes(("then",))
            self.skip("then")
            bodies.append(self.nodes(("elif", "else", "fi")))
            if not self.is_at("elif"):
                break
            self.skip("elif")
        has_else = self.is_at("else")
        if has_else:
            self.skip("else")
            bodies.append(self.nodes(("fi",)))
        self.skip("fi")
        return [*conditions, Branches(bodies, line, has_else)]

    def case(self) -> list[Node]:
        """Read `case ... in pattern) ...;; esac`."""
        line, bodies = self.line(), list[list[Node]]()
        while not self.is_at("in"):
            self.skip(self.word())
        self.skip("in")
        while not self.is_at("esac"):
            while not self.is_at(")", "esac"):
                self.skip(self.word())
            if self.is_at("esac"):
                break
            self.skip(")")
            bodies.append(self.nodes((";;", ";&", ";;&", "esac")))
            if self.is_at(";;", ";&", ";;&"):
                self.at += 1
            while self.is_at("\n"):
                self.at += 1
        self.skip("esac")
        return [Branches(bodies, line)]

    def loop(self) -> list[Node]:
        """Read `for name in words; do ...; done`, or a loop with a condition."""
        line, name, words = self.line(), "", None
        is_over_words = self.is_at("for", "select")
        self.at += 1
        if is_over_words and not self.word().startswith("(("):
            name = self.word()
            self.at += 1
            if self.is_at("in"):
                self.at += 1
                words = [token for token in self.simple_tokens() if isinstance(token, Word)]
        before = self.nodes(("do",))
        self.skip("do")
        body = self.nodes(("done",))
        self.skip("done")
        return [Loop([*before, *body], line, name, words)]

    def simple_tokens(self) -> list[Token]:
        start = self.at
        while self.at < len(self.tokens) and not isinstance(self.tokens[self.at], Operator):
            self.at += 1
        return self.tokens[start : self.at]

    def group(self) -> list[Node]:
        """Read `( ... )` or `{ ...; }`."""
        end = ")" if self.is_at("(") else "}"
        self.at += 1
        nodes = self.nodes((end,))
        self.skip(end)
        return nodes

    def test(self) -> list[Node]:
        """Read over `[[ ... ]]`, which runs nothing."""
        while self.at < len(self.tokens) and not self.is_at("]]"):
            self.at += 1
        self.skip("]]")
        return []

    def negation(self) -> list[Node]:
        """Read over `!`."""
        self.at += 1
        return []

    def function(self) -> Function:
        """Read `name() { ...; }`, or the same after `function`."""
        if self.is_at("function"):
            self.at += 1
        name = self.word()
        self.at += 1
        while self.is_at("(", ")", "\n"):
            if self.is_at("(") and self.tokens[self.at + 1 : self.at + 2] and self.closes_after():
                self.at += 2
            elif self.is_at("\n"):
                self.at += 1
            else:
                break
        return Function(name, self.node())

    def closes_after(self) -> bool:
        return getattr(self.tokens[self.at + 1], "text", "") == ")"


ENDS = ("then", "elif", "else", "fi", "do", "done", "esac", "}", ")", ";;", ";&", ";;&")
COMPOUND = {
    "if": Parser.branches,
    "case": Parser.case,
    **dict.fromkeys(("for", "select", "while", "until"), Parser.loop),
    **dict.fromkeys(("{", "("), Parser.group),
    "[[": Parser.test,
    "function": lambda parser: [parser.function()],
    "!": Parser.negation,
}
