"""Mistakes in migrate."""

from __future__ import annotations

from mutation import Mutation

MIGRATE: list[Mutation] = []
