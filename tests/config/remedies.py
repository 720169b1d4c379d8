"""The remedy that a message names, as a word of the command line, and the command line that follows it."""

from __future__ import annotations

import re
import shlex

from rlhf_suite.config.check.problems import Problem

# `write a=1`, `add 'a=[1,2]'`, `did you mean a=1?`: up to the next space outside of quotes.
ADVICE = re.compile(r"(?:write|add|did you mean|quote the value twice:|a list is) ((?:'[^']*'|[^\s'])+)")
PLACEHOLDER = re.compile(r"<|\.\.\.")


def advised(fix: str) -> str | None:
    """The first word `key=value` of a remedy, if it is a concrete one."""
    found = ADVICE.search(fix)
    word = shlex.split(found[1])[0].rstrip(",;:?") if found and found[1].count("'") % 2 == 0 else ""
    return word if "=" in word and not PLACEHOLDER.search(word) else None


def applied(line: str, problem: Problem, word: str) -> str:
    """The command line with `word` in the place of what it corrects: of the flag that it sets, and of a wrong name or
    value. What lacks another flag stays beside it."""
    old = {word.partition("=")[0]} | ({problem.key} if problem.kind != "rule" else set())
    kept = [each for each in shlex.split(line) if each.lstrip("+").partition("=")[0] not in old]
    return shlex.join([*kept, word])
