"""Errors of rules for mathematics on `tests/rewards/graded_answers.jsonl`: one JSON line per rule.

    python benchmarks/verdicts.py

The suite's own rule and math-verify by itself are always judged. TRL's and verl's rules are, where these packages are
installed (they are optional: an environment of their own with this package beside them will do); the others are named
on stderr. Labels stand in dollar signs for TRL and for math-verify, since both parse text with mathematics in it, and
as they are for verl. `right_gets_0` and `wrong_gets_1` count rows; `not_judged` those for which a rule gives nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

GRADED = Path(__file__).resolve().parent.parent / "tests" / "rewards" / "graded_answers.jsonl"
Answer = tuple[str, str]  # label, response
Rule = Callable[[Sequence[Answer]], list[float | None]]


def own(answers: Sequence[Answer]) -> list[float | None]:
    """The suite's `reward.rule=math`."""
    from rlhf_suite.config.declarations.reward import RuleConfig
    from rlhf_suite.rewards.base import Sample
    from rlhf_suite.rewards.rules import make_scorer

    scorer = make_scorer("math", RuleConfig())
    return [
        each.reward
        for each in scorer([Sample(response, "", response, label, "default") for label, response in answers])
    ]


def math_verify(answers: Sequence[Answer]) -> list[float | None]:
    """What both sides parse to, compared."""
    from math_verify import parse, verify

    return [float(verify(parse(f"${label}$"), parse(response))) for label, response in answers]


def trl(answers: Sequence[Answer]) -> list[float | None]:
    """TRL's `accuracy_reward`."""
    rule = import_module("trl.rewards").accuracy_reward
    said = [[{"role": "assistant", "content": response}] for _, response in answers]
    return list(rule(said, [f"${label}$" for label, _ in answers]))


def verl(name: str) -> Rule:
    """One of verl's rules, by the name of its module."""

    def judge(answers: Sequence[Answer]) -> list[float | None]:
        rule = import_module(f"verl.utils.reward_score.{name}").compute_score
        found = [rule(response, label) for label, response in answers]
        return [float(each["acc"] if isinstance(each, dict) else each) for each in found]

    return judge


# For each rule: the package that it comes from, and the function.
RULES: dict[str, tuple[str, Rule]] = {
    "reward.rule=math": ("rlhf-suite", own),
    "math-verify": ("math-verify", math_verify),
    "TRL accuracy_reward": ("trl", trl),
    "verl math_verify": ("verl", verl("math_verify")),
    "verl math_reward": ("verl", verl("math_reward")),
    "verl math_dapo": ("verl", verl("math_dapo")),
}


def main() -> None:
    """Print a line for each rule whose package is here."""
    rows = [json.loads(line) for line in GRADED.read_text().splitlines()]
    for name, (package, rule) in RULES.items():
        try:
            given = rule([(row["label"], row["response"]) for row in rows])
        except ImportError as error:
            print(f"{name} is not judged: {error}. Install {package} in an environment beside it", file=sys.stderr)
            continue
        passed = [score is not None and score > 0.5 for score in given]
        counts = {
            "right_gets_0": sum(row["right"] and not up for row, up in zip(rows, passed, strict=True)),
            "wrong_gets_1": sum(up and not row["right"] for row, up in zip(rows, passed, strict=True)),
            "not_judged": given.count(None),
        }
        sides = {"right": sum(row["right"] for row in rows), "wrong": sum(not row["right"] for row in rows)}
        print(json.dumps({"rule": name, "version": version(package)} | sides | counts), flush=True)


if __name__ == "__main__":
    main()
