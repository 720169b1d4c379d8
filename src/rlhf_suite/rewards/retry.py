"""Retry the rows that got no score, and wait longer before each attempt."""

from __future__ import annotations

import random
import time
from dataclasses import replace

from rlhf_suite.rewards.base import Outcome, RewardFailure, Sample, ScoringFunction

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0


def with_retries(score: ScoringFunction, rows: list[Sample], num_retries: int) -> list[Outcome]:
    """Return one outcome per row. Rows that failed are scored again together, up to `num_retries` times.

    The `retries` of each outcome count the attempts after the first.
    """
    outcomes = score(rows)
    for attempt in range(1, num_retries + 1):
        failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, RewardFailure)]
        if not failed:
            break
        time.sleep(wait_s(attempt))
        for i, again in zip(failed, score([rows[i] for i in failed]), strict=True):
            outcomes[i] = replace(again, retries=outcomes[i].retries + 1 + again.retries)
    return outcomes


def wait_s(attempt: int, asked: str | None = None) -> float:
    """Return the seconds to wait before retry `attempt` (counted from 1).

    The wait doubles with each retry. It is drawn at random so that clients that failed together do not retry together.
    `asked` is the header Retry-After of a server: if it has seconds, they are the wait, up to the longest one.
    """
    if asked is not None and asked.isascii() and asked.isdigit():
        return min(float(asked), LONGEST_WAIT_S)
    return min(FIRST_WAIT_S * 2 ** min(attempt - 1, 10), LONGEST_WAIT_S) * random.uniform(0.5, 1.0)
