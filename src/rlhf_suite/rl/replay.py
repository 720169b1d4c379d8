"""Training on the rollouts that an earlier run recorded (`rollout.replay`): nothing is sampled, there are no engines.

With the flags of the recorded run the weights come out the same, bit for bit. With others, such as another estimator,
loss or learning rate, the policy soon is another one than that which wrote the tokens: `mismatch/mean` says how far it
has moved away, and `algo.advantage.is_correction_level` corrects for it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.errors import UserError
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.sample_table import read_table
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.run_folders.run_folder import samples_file


class Replay:
    """The rollouts in a folder, each read when its step begins. `routed`: with the routes of their engines."""

    def __init__(self, folder: Path, routed: bool = False) -> None:
        self.folder, self.routed = folder, routed

    @property
    def steps(self) -> int:
        """How many rollouts there are, from the first step on without a gap."""
        count = 0
        while samples_file(self.folder, count + 1).exists():
            count += 1
        return count

    def take(self, step: int) -> tuple[ScoredTrajectories, dict[str, float]]:
        """Return the recorded rollout of a step (0-based), with its shaped rewards, and metrics of its samples."""
        scored = read_table(samples_file(self.folder, step + 1))
        if self.routed and any(t.routes is None for t in scored.trajectories):
            raise UserError(
                f"rollout.replay={self.folder.parent}: its engines returned no routes. Write actor.routing_replay=false"
            )
        if not self.routed:
            scored = replace(scored, trajectories=[replace(t, routes=None) for t in scored.trajectories])
        return scored, sample_metrics(scored)

    def save(self, folder: Path) -> None:
        """Write nothing: what is trained on is in files already."""

    def load(self, folder: Path) -> None:
        """Read nothing."""


class NoEngines:
    """Stands where other runs bring their weights to the engines (`rl/engine_update.py`)."""

    beside: None = None
    version = 0

    def first(self, version: int) -> None:
        pass

    def start(self, version: int, batch: TokenBatch) -> dict[str, float]:
        return {}

    def finish(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass
