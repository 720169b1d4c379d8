"""Mistakes in rewards, their processes and user files."""

from __future__ import annotations

from mutation import Mutation

VERDICTS: list[Mutation] = []
