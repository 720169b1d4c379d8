"""Scored trajectories as they flow through a step: selected and joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.data.trajectory import EpisodeRows, Trajectory


@dataclass(frozen=True)
class ScoredTrajectories:
    """B trajectories that have a reward, whole groups only, with their text.

    Where an episode has several ledgers, each has the reward, score and further values of the whole episode.
    """

    trajectories: list[Trajectory]
    rewards: NDArray[np.float32]  # [B] learned from; rl/shaping.py replaces them by shaped ones
    scores: NDArray[np.float32]  # [B] evaluated
    responses: list[str]
    queries: list[str]  # prompts and responses with special tokens, as rewards saw them
    extra: list[dict[str, float]] = field(default_factory=list)
    greedy: NDArray[np.float32] | None = None  # [B] reward of the greedy response to the same prompt
    retries: NDArray[np.int32] | None = None  # [B] tries before the one that gave the reward
    reasons: list[dict[str, str]] | None = None  # what judges wrote of each, by name, for people to read

    @property
    def prompts(self) -> list[str]:
        """The text of each prompt."""
        return [t.prompt.text for t in self.trajectories]

    @property
    def labels(self) -> list[str]:
        """What rules compare each response with."""
        return [t.prompt.label for t in self.trajectories]

    @property
    def datasources(self) -> list[str]:
        """The column `datasource` of each row."""
        return [t.prompt.datasource for t in self.trajectories]

    def take(self, indices: Sequence[int]) -> ScoredTrajectories:
        """Return the samples `indices`, in that order."""

        def choose(values: Any) -> Any:
            if isinstance(values, np.ndarray):
                return values[list(indices)]
            return values if values is None else [values[i] for i in indices]

        return ScoredTrajectories(*(choose(getattr(self, column.name)) for column in fields(self)))

    def episodes(self) -> ScoredTrajectories:
        """Return one row for each episode, its last ledger."""
        rows = EpisodeRows.of(self.trajectories)
        return self.take(rows.lasts.tolist()) if rows.have_forks else self

    def by_group(self) -> list[ScoredTrajectories]:
        """Return the samples of each group, in the order of the groups' numbers."""
        members: dict[int, list[int]] = {}
        for place, trajectory in enumerate(self.trajectories):
            members.setdefault(trajectory.group, []).append(place)
        return [self.take(members[group]) for group in sorted(members)]


def join_groups(groups: Sequence[ScoredTrajectories]) -> ScoredTrajectories:
    """Return groups as the samples of one step, numbered from 0."""
    numbered = [replace(t, group=number) for number, group in enumerate(groups) for t in group.trajectories]
    return replace(concatenate_samples(groups), trajectories=numbered)


def concatenate_samples(parts: Sequence[ScoredTrajectories]) -> ScoredTrajectories:
    """Return the samples of all parts, one part after the other."""

    def together(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if name == "reasons" and any(values):  # a judge of some data sources alone
            values = [value or [{}] * len(part.trajectories) for value, part in zip(values, parts, strict=True)]
        if values[0] is None:
            return None
        return np.concatenate(values) if isinstance(values[0], np.ndarray) else list(chain.from_iterable(values))

    return ScoredTrajectories(*(together(column.name) for column in fields(ScoredTrajectories)))
