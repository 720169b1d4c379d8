"""Rewarded trajectories to experience: log-probs of policy, reference and teacher, and the critic's values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rlhf_suite.algo.correction import mismatch
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.data.batch import require_column
from rlhf_suite.data.trajectory import Experience, to_batch
from rlhf_suite.distributed.group import Pending
from rlhf_suite.rl.mismatch import check_mismatch, correct
from rlhf_suite.rl.model_groups import CriticGroup, PolicyGroup, ReferenceGroup
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.rl.sharding import ForwardBatch
from rlhf_suite.rl.teachers import Teachers


class ExperienceMaker:
    """Runs the forward passes of a rollout, all roles at the same time."""

    def __init__(  # noqa: PLR0913 - every model takes part
        self,
        algo: AlgoConfig,
        temperature: float,
        policy: PolicyGroup,
        reference: ReferenceGroup | None,
        critic: CriticGroup | None,
        *,
        steps_per_rollout: int,
        critic_warm_up: int,
        mismatch_limit: float,
        token_entropy: bool = False,
        chooses_tokens: bool = False,
        teachers: Teachers | None = None,
    ) -> None:
        self.algo, self.temperature, self.mismatch_limit = algo, temperature, mismatch_limit
        self.policy, self.critic = policy, critic
        self.reference, self.teachers = reference, teachers
        self.needs_entropies = token_entropy or algo.advantage.needs("entropies")
        # With one optimiser step per rollout the policy has not moved when it trains: its own log-probs are old.
        self.needs_old_log_probs = (
            self.needs_entropies
            or reference is not None
            or teachers is not None
            or steps_per_rollout > 1
            or algo.advantage.is_correction_level != "off"
            or algo.filters  # groups may wait for their step, and grow old
            or chooses_tokens
            or critic_warm_up > 0  # the policy does not train at every step
        )

    def make(self, scored: ScoredTrajectories, version: int) -> tuple[Experience, dict[str, float]]:
        """Return the samples with their rewards and, as far as the run needs them, `old_log_probs`, `entropies`,
        `ref_log_probs`, `teacher_log_probs`, `values`, `correction` and `greedy`; and metrics.

        `version`: that of the policy's weights.
        """
        greedy = None if scored.greedy is None else torch.from_numpy(scored.greedy)
        batch = replace(to_batch(scored.trajectories), reward=torch.from_numpy(scored.rewards), greedy=greedy)
        taught = None if self.teachers is None else self.teachers.ask(scored.trajectories, batch, self.temperature)
        batch = replace(batch, **self.forward(ForwardBatch(batch)))
        if taught is not None:
            batch = replace(batch, teacher_log_probs=taught.result())
        metrics = self.mismatch(batch, version) if self.needs_old_log_probs else {}
        if taught is not None:
            metrics |= taught.metrics(batch)
        batch, correction = correct(batch, self.algo.advantage)
        return batch, metrics | correction

    def forward(self, batch: ForwardBatch) -> dict[str, Any]:
        """Return what the models say of each token, by column."""
        pending: dict[str, Pending[torch.Tensor]] = {}
        if self.needs_old_log_probs:
            ask = self.policy.log_probs_and_entropies if self.needs_entropies else self.policy.log_probs
            pending["old_log_probs"] = ask(batch, self.temperature)
        if self.reference is not None:
            pending["ref_log_probs"] = self.reference.log_probs(batch, self.temperature)
        if self.critic is not None:
            pending["values"] = self.critic.values(batch)
        del batch  # what was sent, and below an answer that was read, does not stay in memory
        columns = {name: pending.pop(name).result() for name in [*pending]}
        if self.needs_entropies:
            columns["old_log_probs"], columns["entropies"] = columns["old_log_probs"].t().contiguous()
        return columns

    def mismatch(self, batch: Experience, version: int) -> dict[str, float]:
        """Measure how far the engines' log-probs are from the trainer's where the same weights wrote both; past the
        limit the run stops. Tokens of older weights are expected to differ: how far the policy has moved since they
        were sampled is a metric of its own. There is none over no tokens."""
        is_new = require_column(batch.weight_version, "weight_version") == version
        engine, old = (
            require_column(batch.engine_log_probs, "engine_log_probs"),
            require_column(batch.old_log_probs, "old_log_probs"),
        )
        metrics, mask = dict[str, float](), batch.mask.bool()
        if (same := mismatch(engine, old, mask & is_new)) is not None:
            check_mismatch(same.mean_abs, self.mismatch_limit)
            metrics |= {"mismatch/mean": same.mean_abs, "mismatch/max": same.max_abs, "train/vllm_kl": same.kl}
        if (moved := mismatch(engine, old, mask & ~is_new)) is not None:
            gaps = {"mean": moved.mean_abs, "max": moved.max_abs, "kl": moved.kl}
            metrics |= {f"async/policy_gap_{name}": value for name, value in gaps.items()}
        return metrics
