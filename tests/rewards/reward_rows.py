"""Rows of the tests of reward processes."""

from __future__ import annotations

from rlhf_suite.rewards.base import Sample


def row(label: str, response: str = "r") -> Sample:
    return Sample(query="q" + response, prompt="q", response=response, label=label, datasource="default")
