"""Further tries of what failed: how many, and how long to wait before each."""

from __future__ import annotations

import random
import time
from dataclasses import replace

from rlhf_suite.rewards.base import Outcome, RewardFailure, RewardRow, Scorer

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0


def with_retries(score: Scorer, rows: list[RewardRow], num_retries: int) -> list[Outcome]:
    """One outcome per row by `score`; rows that failed, by an error or a time-out, are asked for again together, up to
    `num_retries` times. Each outcome says how often."""
    outcomes = score(rows)
    for attempt in range(1, num_retries + 1):
        failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, RewardFailure)]
        if not failed:
            break
        time.sleep(wait_s(attempt))
        for i, again in zip(failed, score([rows[i] for i in failed]), strict=True):
            outcomes[i] = replace(again, retries=outcomes[i].retries + 1 + again.retries)
    return outcomes


def wait_s(attempt: int) -> float:
    """Seconds before try `attempt` (1: the second): doubling, and drawn so that requests do not come back in step."""
    return min(FIRST_WAIT_S * 2 ** min(attempt - 1, 10), LONGEST_WAIT_S) * random.uniform(0.5, 1.0)
