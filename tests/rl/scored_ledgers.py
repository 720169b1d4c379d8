"""Scores of ledgers as one batch: what evaluations make of the scores of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.rl.samples import ScoredTrajectories, concatenate_samples
from rlhf_suite.rl.scoring import Scorer


def score_ledgers(scorer: Scorer, ledgers: Sequence[Trajectory]) -> tuple[ScoredTrajectories, Mapping[str, float]]:
    """Score ledgers of any groups in one call, check the share of failures, and return the samples that are left."""
    groups: dict[int, list[Trajectory]] = {}
    for ledger in ledgers:
        groups.setdefault(ledger.group, []).append(ledger)
    scores = scorer.score([*groups.values()])
    scorer.check(scores.groups.values())
    kept = [group.samples for group in scores.groups.values() if group.samples is not None]
    return concatenate_samples(kept), scores.counts
