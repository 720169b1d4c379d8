"""The marks that stand in a resolved text for what the script alone does not tell, and how such a text is written.

A variable that the script does not set stays one: a shell replaces it when the new command runs. What only the old
script could compute, such as `$(nproc)`, has no place in the new command. Both are marked by characters that no word
of a shell can hold.
"""

from __future__ import annotations

import re
import shlex

OPEN, FOREIGN = "\0", "\1"  # around the expression of a variable; around the text of what cannot be computed
VARIABLE = re.compile(f"{OPEN}([^{OPEN}]*){OPEN}")
MARKED = re.compile(f"([{OPEN}{FOREIGN}])([^{OPEN}{FOREIGN}]*)\\1")
# What may stand between the braces of `${...}` in a new command: pasting it runs nothing.
HARMLESS = re.compile(r"\w+(?:[#%]{1,2}[\w./*-]*)?|\(\([\w\s+*/%()-]+\)\)")


def whole_number(text: str) -> int | None:
    """Return the number that a text of digits, perhaps after a minus sign, stands for; None for any other text."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def variable(expression: str) -> str:
    """Return the mark of a variable, by what stands between the braces of `${...}`; of arithmetic by `((...))`."""
    is_harmless = HARMLESS.fullmatch(expression) is not None
    return f"{OPEN}{expression}{OPEN}" if is_harmless else foreign(f"${{{expression}}}")


def foreign(text: str) -> str:
    """Return the mark of something that only the old script could compute."""
    return f"{FOREIGN}{text.replace(OPEN, '').replace(FOREIGN, '')}{FOREIGN}"


def is_open(text: str) -> bool:
    """Return whether a text has variables that the script does not set, or what cannot be computed."""
    return OPEN in text or FOREIGN in text


def only_variables(text: str) -> bool:
    """Return whether a text is nothing but variables, so that it may stand for any number of words, or none."""
    return bool(text) and not MARKED.sub("", text)


def readable(text: str) -> str:
    """Return a text as a script would have it."""
    return MARKED.sub(lambda match: in_braces(match[2]) if match[1] == OPEN else match[2], text)


def in_braces(expression: str) -> str:
    """Return a variable as a shell reads it."""
    if expression.startswith("(("):
        return f"${expression}"
    return f"${{{expression}}}" if not expression.isidentifier() else f"${expression}"


def in_shell(word: str) -> str:
    """Return a word as a shell reads it back: variables are replaced when it does, and nothing else is."""
    if OPEN in word:
        escaped = re.sub(r'([\\"$`])', r"\\\1", word)
        return f'"{VARIABLE.sub(lambda match: brace(match[1]), escaped)}"'
    if "\n" in word:
        escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        return f"$'{escaped}'"
    return shlex.quote(word)


def brace(expression: str) -> str:
    """Return a variable whose end is plain whatever follows it."""
    return f"${expression}" if expression.startswith("((") else f"${{{expression}}}"
