"""Mistakes in the jail, its clients and the servers."""

from __future__ import annotations

from mutation import Mutation

LIMITS: list[Mutation] = []
