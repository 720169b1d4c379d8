"""Mistakes in weights, adapters, exports and the planner."""

from __future__ import annotations

from mutation import Mutation

BORDER: list[Mutation] = []
