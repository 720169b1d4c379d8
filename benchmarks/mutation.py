"""A mistake that a post-training system can make without a crash: one edit of a file, and what is to notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`before` stands once in `file` (below src/rlhf_suite) and becomes `after`; `tests` (pytest's words) must fail."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
