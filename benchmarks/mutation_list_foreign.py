"""Mistakes in agents of other frameworks, episode workers and sessions."""

from __future__ import annotations

from mutation import Mutation

FOREIGN: list[Mutation] = []
