"""Training on the rollouts that an earlier run recorded (`rollout.replay`): nothing is sampled, there are no engines.

With the flags of the recorded run the weights come out the same, bit for bit. With others, such as another estimator,
loss or learning rate, the policy soon is another one than that which wrote the tokens: `mismatch/mean` says how far it
has moved away, and `algo.advantage.is_correction_level` corrects for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.foreign_files import parquet
from rlhf_suite.rl.rollout_file import GREEDY
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.rl.schedules import WithTheStep
from rlhf_suite.tracking.run_folder import samples_file

NUMBERS = re.compile(r"(reward|agent)/")  # columns of further numbers of a sample


class Replay(WithTheStep):
    """A schedule whose rollouts are those in a folder. `sources`: the source of each prompt of the run."""

    def __init__(self, folder: Path, sources: Sequence[str]) -> None:
        self.folder, self.sources = folder, sources

    @property
    def steps(self) -> int:
        """How many rollouts there are, from the first step on without a gap."""
        count = 0
        while samples_file(self.folder, count + 1).exists():
            count += 1
        return count

    def take(self, step: int) -> tuple[ScoredTrajectories, dict[str, float]]:
        """Return the recorded rollout of a step (0-based), with its shaped rewards, and metrics of its samples."""
        scored = read_rollouts(samples_file(self.folder, step + 1))
        return scored, sample_metrics(scored, self.sources)

    def save(self, folder: Path) -> None:
        pass

    def load(self, folder: Path) -> None:
        pass


class NoEngines:
    """Stands where the weight sync of other runs is: there is nobody to send weights to."""

    def sync(
        self, version: int, batch: TokenBatch | None = None, queued: Callable[[], object] = lambda: None
    ) -> dict[str, float]:
        return {}

    def check(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def read_rollouts(path: Path) -> ScoredTrajectories:
    """Return the samples in a file that `write_rollouts` wrote."""
    with parquet(path) as file:
        table = file.read()
    names = set(table.column_names)

    def values(name: str) -> list[Any]:
        found: list[Any] = table[name].to_pylist()
        return found

    def floats(name: str) -> np.ndarray:
        return table[name].to_numpy().astype(np.float32)

    def tokens(name: str) -> list[np.ndarray]:
        column = table[name].combine_chunks()
        return np.split(column.values.to_numpy(), column.offsets.to_numpy()[1:-1])

    ids = [each.astype(np.int64) for each in tokens("ids")]
    turns = tokens("turn_rewards") if "turn_rewards" in names else [np.zeros(len(each), np.float32) for each in ids]
    per_token = zip(ids, tokens("owner"), tokens("engine_log_probs"), tokens("weight_version"), turns, strict=True)
    places = zip(
        *(values(name) for name in ("prompt_index", "group", "sample", "finish_reason", "ledger")), strict=True
    )
    trajectories = [
        Trajectory(prompt, group, sample, *columns, finish_reason=reason, fork=fork)
        for columns, (prompt, group, sample, reason, fork) in zip(per_token, places, strict=True)
    ]
    numbers = [name for name in table.column_names if NUMBERS.match(name)]
    rows = zip(*(values(name) for name in numbers), strict=True) if numbers else [()] * len(ids)
    extra = [
        {name.removeprefix("reward/"): value for name, value in zip(numbers, row, strict=True) if value is not None}
        for row in rows
    ]
    return ScoredTrajectories(
        trajectories,
        rewards=floats("reward"),
        scores=floats("score"),
        extra=extra,
        greedy=floats(GREEDY) if GREEDY in names else None,
        prompts=values("prompt"),
        responses=values("response"),
        labels=values("label"),
        datasources=values("datasource"),
        queries=values("reward_query"),
    )
