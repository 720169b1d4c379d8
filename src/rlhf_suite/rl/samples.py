"""Scored trajectories as they flow through a step: selected, joined, and kept on disk between steps."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.data.images import Image
from rlhf_suite.data.trajectory import EpisodeRows, Trajectory


@dataclass(frozen=True)
class ScoredTrajectories:
    """B trajectories that have a reward, whole groups only, with their text.

    Where an episode has several ledgers, each has the reward, score and further values of the whole episode.
    """

    trajectories: list[Trajectory]
    rewards: NDArray[np.float32]  # [B] learned from; rl/shaping.py replaces them by shaped ones
    scores: NDArray[np.float32]  # [B] evaluated
    prompts: list[str]
    responses: list[str]
    labels: list[str]
    datasources: list[str]
    queries: list[str]  # prompts and responses with special tokens, as rewards saw them
    extra: list[dict[str, float]] = field(default_factory=list)
    greedy: NDArray[np.float32] | None = None  # [B] reward of the greedy response to the same prompt
    retries: NDArray[np.int32] | None = None  # [B] tries before the one that gave the reward

    def take(self, indices: Sequence[int]) -> ScoredTrajectories:
        """Return the samples `indices`, in that order."""

        def chosen(values: Any) -> Any:
            if isinstance(values, np.ndarray):
                return values[list(indices)]
            return values if values is None else [values[i] for i in indices]

        return ScoredTrajectories(*(chosen(getattr(self, each.name)) for each in fields(self)))

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


def joined(groups: Sequence[ScoredTrajectories]) -> ScoredTrajectories:
    """Return groups as the samples of one step, numbered from 0."""
    numbered = [replace(t, group=number) for number, group in enumerate(groups) for t in group.trajectories]
    return replace(concatenated(groups), trajectories=numbered)


def concatenated(parts: Sequence[ScoredTrajectories]) -> ScoredTrajectories:
    """Return the samples of all parts, one part after the other."""

    def together(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if values[0] is None:
            return None
        return np.concatenate(values) if isinstance(values[0], np.ndarray) else list(chain.from_iterable(values))

    return ScoredTrajectories(*(together(each.name) for each in fields(ScoredTrajectories)))


def write_samples(folder: Path, whole: ScoredTrajectories) -> None:
    """Write the arrays of samples as one .npz and everything else as JSON: nothing in the files is code."""
    arrays, others = split_fields(whole, skip=("trajectories",))
    rows = [split_fields(t, skip=("images",)) for t in whole.trajectories]
    images = [[(i.start, i.length, b64encode(i.data).decode()) for i in t.images] for t in whole.trajectories]
    names = list(rows[0][0])
    arrays |= {f"t.{name}": np.concatenate([row[0][name] for row in rows]) for name in names}
    arrays["lengths"] = np.array([len(t.ids) for t in whole.trajectories])
    np.savez(folder / "samples.npz", **arrays)
    plain = {"samples": others, "trajectories": [row[1] for row in rows], "images": images}
    (folder / "samples.json").write_text(json.dumps(plain))


def has_samples(folder: Path) -> bool:
    """Return whether `write_samples` wrote into the folder."""
    return (folder / "samples.json").exists()


def read_samples(folder: Path) -> ScoredTrajectories:
    """Read what `write_samples` wrote."""
    others = json.loads((folder / "samples.json").read_text())
    with np.load(folder / "samples.npz", allow_pickle=False) as file:
        arrays = dict(file)
    borders = arrays.pop("lengths").cumsum()[:-1]
    per_token = {name[2:]: np.split(arrays.pop(name), borders) for name in list(arrays) if name.startswith("t.")}
    trajectories = []
    for i, rest in enumerate(others["trajectories"]):
        values: dict[str, Any] = rest | {name: parts[i] for name, parts in per_token.items()}
        images = tuple(Image(start, length, b64decode(data)) for start, length, data in others["images"][i])
        trajectories.append(Trajectory(**values, images=images))
    return ScoredTrajectories(trajectories=trajectories, **arrays, **others["samples"])


def split_fields(record: Any, skip: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a dataclass that are arrays, and the others, which are plain JSON values."""
    values = {each.name: getattr(record, each.name) for each in fields(record) if each.name not in skip}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    return arrays, {name: value for name, value in values.items() if name not in arrays}
