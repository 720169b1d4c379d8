"""Typed handles on the models of a run: batches are split over the ranks, and results come back in their order.

Each method starts its calls and does not wait, so that models work at the same time; `Pending.result` waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.group import ModelGroup, Pending
from rlhf_suite.rl.sharding import Division, ForwardBatch, split
from rlhf_suite.train.trained_worker import TrainedGroup
from rlhf_suite.weight_sync.digests import WHOLE, Manifest

# Columns that become others before the models train.
OF_THE_DRIVER = ("owner", "weight_version", "entropies", "teacher_log_probs", "turn_rewards")
OF_THE_POLICY = ("engine_log_probs", "old_log_probs", "ref_log_probs", "correction", "advantages", "chosen", "routes")


class ForwardGroup(ModelGroup):
    """The ranks of a model that reads batches. `replays`: it takes the routes of the engines, which the policy alone
    does: they are choices of its own weights."""

    replays: ClassVar[bool] = False

    def per_token(self, method: str, batch: ForwardBatch, *args: object, activity: str) -> Pending[torch.Tensor]:
        """Start a forward pass whose answer is a number per token, [T] in the order of the batch."""
        return self._start(method, batch, args, activity, Division.per_token)

    def per_sequence(self, method: str, batch: ForwardBatch, *args: object, activity: str) -> Pending[torch.Tensor]:
        """Start a forward pass whose answer is a number per sequence, [B] in the order of the batch."""
        return self._start(method, batch, args, activity, Division.per_row)

    def _start(
        self,
        method: str,
        batch: ForwardBatch,
        args: Sequence[object],
        activity: str,
        combine: Callable[[Division, list[torch.Tensor]], torch.Tensor],
    ) -> Pending[torch.Tensor]:
        """Start a forward pass whose answer is made of those of one rank for each part of the batch."""
        mesh = self.group.mesh
        division, shards = batch.over(mesh.data, self.replays)
        refs = self.group.start_sharded(method, shards, *args)
        name = f"{self.name}: {activity}"
        return Pending(self.group, refs, name, lambda answers: combine(division, mesh.one_per_part(answers)))


class ReferenceGroup(ForwardGroup):
    """The frozen reference or teacher."""

    def log_probs(
        self, batch: ForwardBatch, temperature: float, activity: str = "log-probs of the rollout"
    ) -> Pending[torch.Tensor]:
        """Start to compute the log-probs of the masked tokens, [T]; 0 elsewhere."""
        return self.per_token("log_probs", batch, temperature, activity=activity)


class WithoutAdaptersGroup(ReferenceGroup):
    """The ranks of the policy as the reference or teacher: the policy without its adapters."""

    def log_probs(
        self, batch: ForwardBatch, temperature: float, activity: str = "log-probs of the rollout without its adapters"
    ) -> Pending[torch.Tensor]:
        return self.per_token("log_probs_without_adapters", batch, temperature, activity=activity)


class UpdatedGroup(ForwardGroup, TrainedGroup):
    """The ranks of a model that is trained on rollouts. `unread`: columns that its updates do not read, so that they
    stay with the driver."""

    unread: ClassVar[tuple[str, ...]]

    def train(
        self, batch: Experience, steps: Sequence[Sequence[int]], *args: object, activity: str
    ) -> Pending[dict[str, float]]:
        """Start the optimiser steps, each on its sequences of `batch`; the answer is the mean of each metric over
        them."""
        left_out: dict[str, Any] = dict.fromkeys(self.unread)
        sent = replace(batch, **left_out)
        refs = self.group.start_sharded("update", split(sent, steps, self.group.mesh.data), *args)
        return Pending(self.group, refs, f"{self.name}: {activity}", lambda answers: answers[0])


class PolicyGroup(UpdatedGroup, ReferenceGroup):
    """The policy."""

    unread = (*OF_THE_DRIVER, "values", "returns")
    replays = True

    def log_probs_and_entropies(self, batch: ForwardBatch, temperature: float) -> Pending[torch.Tensor]:
        """Start to compute the log-probs and the entropies of the masked tokens, [T, 2]; 0 elsewhere."""
        return self.per_token("log_probs_and_entropies", batch, temperature, activity="log-probs of the rollout")

    def log_probs_of_average(self, batch: ForwardBatch, temperature: float) -> Pending[torch.Tensor]:
        """Start to compute the log-probs of the masked tokens by the average of the weights, [T]; 0 elsewhere."""
        activity = "log-probs of the rollout by the average of the weights"
        return self.per_token("log_probs_of_average", batch, temperature, activity=activity)

    def update(
        self,
        batch: Experience,
        steps: Sequence[Sequence[int]],
        first_step: int,
        kl_coef: float,
        entropy_coef: float | None,
        activity: str,
    ) -> Pending[dict[str, float]]:
        """Start optimiser steps on sequences of `batch`, the first one at `first_step` of the schedule."""
        return self.train(batch, steps, first_step, kl_coef, entropy_coef, activity=activity)

    def open_sender(self, backend: str, check: bool, timeout_s: float, keep: bool) -> tuple[str, int]:
        """Prepare rank 0 to send weights, and return the (host, port) where it meets the engines. With `check` every
        tensor is sent with its digest; with `keep` what was sent last stays in memory."""
        started = self.submit("open_sender", backend, check, timeout_s, keep, activity="preparing to send weights")
        address: tuple[str, int] = started.result()
        return address

    def join_sender(self, host: str, port: int) -> None:
        """Prepare the other ranks to send too, each to the engine on its own GPU."""
        self.submit("join_sender", host, port, activity="preparing to send weights").result()

    def connect_sender(self, world_size: int, meeting: int) -> Pending[str]:
        """Start to wait for the workers of the engines."""
        return self.submit("connect_sender", world_size, meeting, activity="meeting the engines")

    def publish(self, version: int, part: str = WHOLE) -> Pending[Manifest]:
        """Start to send all weights, or a part of them."""
        return self.submit("publish", version, part, activity=f"sending the weights of version {version}")

    def publish_again(self, version: int, part: str = WHOLE) -> Pending[Manifest]:
        """Start to send what was sent by the last sync, of `version`, again."""
        return self.submit("publish_again", version, part, activity=f"sending the weights of version {version} again")

    def release(self) -> Pending[None]:
        """Start to free what the last sync took."""
        return self.submit("release", activity="freeing what was sent")


class CriticGroup(UpdatedGroup):
    """The value model."""

    unread = (*OF_THE_DRIVER, *OF_THE_POLICY)

    def values(self, batch: ForwardBatch) -> Pending[torch.Tensor]:
        """Start to compute the state values at the model tokens, [T]."""
        return self.per_token("values", batch, activity="values of the rollout")

    def update(
        self, batch: Experience, steps: Sequence[Sequence[int]], first_step: int, activity: str
    ) -> Pending[dict[str, float]]:
        """Start optimiser steps on sequences of `batch`, the first one at `first_step` of the schedule."""
        return self.train(batch, steps, first_step, activity=activity)


class RewardGroup(ForwardGroup):
    """The reward model."""

    def scores(self, batch: ForwardBatch) -> Pending[torch.Tensor]:
        """Start to compute what the model says of each sequence, [B]."""
        return self.per_sequence("scores", batch, activity="scores")


class ProcessRewardGroup(ForwardGroup):
    """The process reward model."""

    def probabilities(self, batch: ForwardBatch, columns: list[int]) -> Pending[torch.Tensor]:
        """Start to compute P(good) at the masked tokens, [T]; the batch holds the tokens of the model itself."""
        return self.per_token("probabilities", batch, columns, activity="probabilities of steps")
