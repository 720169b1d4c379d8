"""Mistakes in losses, credit, roles and metrics, found by a second round of trials."""

from __future__ import annotations

from mutation import Mutation

NUMBERS: list[Mutation] = []
