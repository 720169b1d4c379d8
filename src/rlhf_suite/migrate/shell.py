"""What a shell script runs, as far as its text tells: each command with its words, in the order of the script.

Variables, arrays, arithmetic, here-documents, functions, loops over words and commands within commands (`bash -c`,
`eval`) are followed. Of branches each is, since nobody knows which one is taken; what depends on one has a note.
Nothing is run: what only a shell can compute is marked (`shell_text.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from rlhf_suite.errors import UserError
from rlhf_suite.migrate.shell_grammar import Branches, Loop, Node, Simple, parse
from rlhf_suite.migrate.shell_text import FOREIGN, OPEN, is_open, readable
from rlhf_suite.migrate.shell_values import Scope, Value
from rlhf_suite.migrate.shell_words import Redirection, Word

MAX_COMMANDS = 5000
MAX_WITHIN = 8  # commands that commands run
ASSIGNMENT = re.compile(r"(\w+)(?:\[(\w*)\])?(\+?)=(.*)", re.DOTALL)
DECLARES = ("export", "declare", "local", "readonly", "typeset")
SHELLS = ("bash", "sh", "zsh", "dash")
OPTION_OF_SHELL = re.compile(r"-[a-z]*c")
CHANGES = re.compile(r"(?<![\w$])([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")


@dataclass(frozen=True)
class Statement:
    """A command with its words, the variables that it exports, and what is uncertain in its words."""

    words: tuple[str, ...]
    line: int
    environment: dict[str, str]
    notes: tuple[str, ...] = ()
    redirections: tuple[str, ...] = ()


@dataclass
class Shell:
    """The state of a script between two of its commands."""

    scope: Scope = field(default_factory=Scope)
    exported: dict[str, str] = field(default_factory=dict)
    functions: dict[str, list[Node]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    statements: list[Statement] = field(default_factory=list)
    depth: int = 0
    commands: int = 0

    def run(self, nodes: Sequence[Node]) -> None:
        """Follow commands in their order."""
        for node in nodes:
            if isinstance(node, Simple):
                self.command(node)
            elif isinstance(node, Branches):
                self.branches(node)
            elif isinstance(node, Loop):
                self.loop(node)
            else:
                self.functions[node.name] = node.body

    def run_text(self, text: str, line: int) -> None:
        """Follow the commands of a text, within the command at `line`."""
        self.within(parse(readable(text), line), line)

    def within(self, nodes: Sequence[Node], line: int) -> None:
        """Follow commands that another command runs.

        Raises:
            UserError: they run each other without end.
        """
        self.depth += 1
        if self.depth > MAX_WITHIN:
            raise UserError(f"line {line}: more than {MAX_WITHIN} commands run each other; give the innermost one")
        self.run(nodes)
        self.depth -= 1

    def branches(self, node: Branches) -> None:
        """Follow each body from the same beginning. Afterwards a variable has the value of before, or, where it had
        none or one body surely runs, that of the first body that sets it."""
        before = self.scope.known
        after = []
        for body in node.bodies:
            self.scope.known = dict(before)
            self.run(body)
            after.append(self.scope.known)
        if not node.is_complete:
            after.insert(0, before)
        self.scope.known = dict(before)
        for name in dict.fromkeys(name for variables in after for name in find_changed(before, variables)):
            self.scope.known.pop(name, None)
            values = list(dict.fromkeys(variables[name] for variables in after if name in variables))
            if not values:
                continue
            others = [show(value) for value in values[1:]] + ["no value"] * any(
                name not in variables for variables in after
            )
            note = f"line {node.line} sets {name} under a condition: {show(values[0])} is taken, not "
            notes = (*values[0].notes, f"{note}{' or '.join(others)}") if others else values[0].notes
            self.scope.known[name] = replace(values[0], notes=notes)

    def loop(self, node: Loop) -> None:
        """Follow a loop over words once for each; another one once, as its first round."""
        texts = None if node.words is None else [text for word in node.words for text in self.scope.fields(word)]
        notes = self.scope.take_notes()
        if texts is not None and not any(map(is_open, texts)):
            for text in texts:
                self.scope.known[node.name] = Value((text,), notes=notes)
                self.run(node.body)
            return
        if node.name:
            listed = " ".join(word.raw for word in node.words or ())
            self.outside(node.name, f"line {node.line} sets ${node.name} to each of {listed}: write a command for each")
        before = dict(self.scope.known)
        first = len(self.statements)
        self.run(node.body)
        others = [name for name in find_changed(before, self.scope.known) if name in before]
        note = f"line {node.line} begins a loop: this command is that of its first round"
        if others:
            note += f"; {', '.join(others)} change"
        for place in range(first, len(self.statements)):
            old = self.statements[place]
            self.statements[place] = replace(old, notes=(*old.notes, note))

    def command(self, node: Simple) -> None:
        """Follow a simple command.

        Raises:
            UserError: the loops of the script are too long to follow.
        """
        line = (node.words or node.redirections)[0].line if node.words or node.redirections else 0
        self.commands += 1
        if self.commands > MAX_COMMANDS:
            raise UserError(f"line {line}: the script runs more than {MAX_COMMANDS} commands; give those of one round")
        count = next((place for place, word in enumerate(node.words) if not is_assignment(word)), len(node.words))
        first, rest = node.words[:count], node.words[count:]
        if not rest:
            for word in first:
                self.assign(word)
            return
        if rest[0].raw in DECLARES:
            self.declare(rest)
            return
        if rest[0].raw.startswith("(("):
            for name in CHANGES.findall(rest[0].raw):
                self.outside(name, f"line {line} computes ${name}, which is not followed")
            return
        environment = {name: text for name, text in map(self.pair, first) if name}
        words = [text for word in rest for text in self.scope.fields(word)]
        self.do(words, node.redirections, environment, line)

    def do(self, words: list[str], redirections: list[Redirection], environment: dict[str, str], line: int) -> None:
        """Follow a command by its words: what it changes, what it runs itself, or that it is one."""
        name = words[0] if words else ""
        if name == "read":
            self.read(words, redirections, line)
        elif name == "unset":
            self.scope.known = {key: value for key, value in self.scope.known.items() if key not in words[1:]}
        elif name in self.functions:
            self.call(name, words[1:], line)
        elif name == "eval":
            self.run_text(" ".join(words[1:]), line)
        elif (place := command_text(words)) is not None:
            self.exported, before = self.exported | environment, self.exported
            self.run_text(words[place].removeprefix("--wrap="), line)
            self.exported = before
        else:
            self.statements.append(self.statement(words, redirections, environment, line))
            self.run_documents(words, redirections, line)

    def run_documents(self, words: list[str], redirections: list[Redirection], line: int) -> None:
        """Follow the here-documents of a command that are scripts."""
        if runs_document(words, redirections):
            for redirection in redirections:
                if redirection.body is not None:
                    self.run_text(self.document(redirection), line)

    def statement(
        self, words: list[str], redirections: list[Redirection], environment: dict[str, str], line: int
    ) -> Statement:
        files = [
            f"{redirection.operator} {redirection.target.raw}"
            for redirection in redirections
            if redirection.target and redirection.body is None
        ]
        notes = self.scope.take_notes()
        return Statement(tuple(words), line, {**self.exported, **environment}, notes, tuple(files))

    def call(self, name: str, arguments: Sequence[str], line: int) -> None:
        """Follow a function with its arguments."""
        self.called.add(name)
        notes = self.scope.take_notes()
        own = {str(place): Value((text,), notes=notes) for place, text in enumerate(arguments, start=1)}
        own |= dict.fromkeys("@*", Value(tuple(arguments), is_array=True, notes=notes))
        before = {key: self.scope.known.pop(key) for key in list(self.scope.known) if key.isdigit() or key in "@*"}
        self.scope.known |= own
        self.within(self.functions[name], line)
        for key in own:
            self.scope.known.pop(key, None)
        self.scope.known |= before

    def read(self, words: Sequence[str], redirections: Sequence[Redirection], line: int) -> None:
        """Follow `read NAME <<EOF`: the text of a here-document is the value."""
        name = words[-1] if len(words) > 1 else "REPLY"
        document = next((redirection for redirection in redirections if redirection.body is not None), None)
        if document is None:
            self.outside(name, f"line {line} reads ${name}, which is not followed")
        else:
            text = self.document(document)
            self.scope.known[name] = Value((text,), notes=self.scope.take_notes(), has_quotes=True)

    def document(self, redirection: Redirection) -> str:
        """Return the text of a here-document: variables have their values unless its name is quoted."""
        body = (redirection.body or "").replace("\\\n", "")
        if not redirection.is_expanded:
            return redirection.body or ""
        escaped = re.sub(r'\\?"', lambda quote: quote[0].replace("\\", "\\\\").replace('"', '\\"'), body)
        return self.scope.text(escaped, redirection.line, is_quoted=True)

    def declare(self, words: Sequence[Word]) -> None:
        """Follow `export NAME=value` and the like."""
        for word in words[1:]:
            if is_assignment(word):
                self.assign(word)
                name = ASSIGNMENT.fullmatch(word.raw)[1]  # type: ignore[index]
            else:
                name = word.raw
            value = self.scope.known.get(name)
            if words[0].raw == "export" and name.isidentifier():
                self.exported[name] = f"{OPEN}{name}{OPEN}" if value is None else " ".join(value.texts)

    def assign(self, word: Word) -> None:
        """Follow an assignment; a value that cannot be computed makes the variable one that is not known."""
        match = ASSIGNMENT.fullmatch(word.raw)
        assert match is not None
        name, index, adds, raw = match.groups(default="")
        before = self.scope.known.get(name, Value(()))
        if word.items is not None:
            texts = tuple(text for item in word.items for text in self.scope.fields(item))
            texts = (*before.texts, *texts) if adds else texts
            self.scope.known[name] = Value(texts, is_array=True, notes=distinct(before.notes, self.scope.take_notes()))
            return
        text = self.scope.text(raw, word.line)
        notes = self.scope.take_notes()
        if index or FOREIGN in text:
            self.outside(name, f"line {word.line} sets {readable(word.raw)}, which is not followed: set it before")
            return
        if adds:
            text, notes = "".join(before.texts) + text, distinct(before.notes, notes)
        self.scope.known[name] = Value((text,), notes=notes)

    def outside(self, name: str, note: str) -> None:
        """Take a variable as one that cannot be followed."""
        self.scope.known.pop(name, None)
        self.scope.outside[name] = note

    def pair(self, word: Word) -> tuple[str, str]:
        """Return the name and the value of an assignment before a command."""
        match = ASSIGNMENT.fullmatch(word.raw)
        return ("", "") if match is None else (match[1], self.scope.text(match[4], word.line))


def statements(text: str) -> list[Statement]:
    """Return the commands of a script, with those of functions that it never calls.

    Raises:
        UserError: it is not a script, or no shell would come to its end soon.
    """
    if OPEN in text or FOREIGN in text:
        raise UserError("the script has characters that no text has; give a shell script")
    shell = Shell()
    shell.run(parse(text))
    for name in [name for name in shell.functions if name not in shell.called]:
        shell.run(shell.functions[name])
    return shell.statements


def is_assignment(word: Word) -> bool:
    return ASSIGNMENT.fullmatch(word.raw) is not None


def command_text(words: Sequence[str]) -> int | None:
    """Return the place of the word that is itself a text of commands: that of `bash -c`, or of `sbatch --wrap`."""
    for place, word in enumerate(words):
        if word.startswith("--wrap="):
            return place
        after = words[place + 1 : place + 4]
        if word == "--wrap" and after:
            return place + 1
        if PurePath(word).name in SHELLS:
            for step, option in enumerate(after[:2], start=1):
                if OPTION_OF_SHELL.fullmatch(option) and place + step + 1 < len(words):
                    return place + step + 1
    return None


def runs_document(words: Sequence[str], redirections: Sequence[Redirection]) -> bool:
    """Return whether a here-document is a script: that of `bash <<EOF`, `sbatch <<EOF`, or `cat > job.sh <<EOF`."""
    targets = [redirection.target.raw for redirection in redirections if redirection.target is not None]
    if any(target.strip("\"'").endswith((".sh", ".slurm", ".sbatch")) for target in targets):
        return True
    return bool(words) and PurePath(words[0]).name in (*SHELLS, "sbatch", "ssh", "srun")


def distinct(*notes: tuple[str, ...]) -> tuple[str, ...]:
    """Return notes in their order, each once."""
    return tuple(dict.fromkeys(note for some in notes for note in some))


def find_changed(before: Mapping[str, Value], after: Mapping[str, Value]) -> list[str]:
    """Return the variables that have another value, or none, afterwards."""
    gone = [name for name in before if name not in after] if len(after) < len(before) else []
    return [name for name, value in after.items() if before.get(name) is not value] + gone


def show(value: Value) -> str:
    return readable(" ".join(value.texts)) or "an empty text"
