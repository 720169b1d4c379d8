"""Mistakes in runs that fail, wait or end: schedules, streams, replay, filters, signals."""

from __future__ import annotations

from mutation import Mutation

FAILURES: list[Mutation] = []
