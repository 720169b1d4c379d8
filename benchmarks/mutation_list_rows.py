"""Mistakes in rows, messages, tokenisation and images."""

from __future__ import annotations

from mutation import Mutation

ROWS: list[Mutation] = []
