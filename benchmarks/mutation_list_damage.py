"""Mistakes in reports, why, sweeps and the first screen."""

from __future__ import annotations

from mutation import Mutation

DAMAGE: list[Mutation] = []
