"""Typed handles on the models of a run: batches are split over the ranks, and results come back in their order.

Each method starts its calls and does not wait, so that models work at the same time; `Pending.result` waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.distributed.group import ModelGroup, Pending
from rlhf_suite.rl.sharding import balanced_parts, reassemble, reassemble_rows, shards, split
from rlhf_suite.train.trained_worker import TrainedGroup
from rlhf_suite.weight_sync.digests import Manifest


class ForwardGroup(ModelGroup):
    """The ranks of a model that reads batches."""

    def per_token(self, method: str, batch: TokenBatch, *args: object, what: str) -> Pending[torch.Tensor]:
        """Start a forward pass whose answer is a number per token, [T] in the order of the batch."""
        parts = balanced_parts(batch, self.group.mesh.data)
        refs = self.group.start_sharded(method, shards(batch, parts), *args)
        return self._answer(refs, what, lambda answers: reassemble(batch, parts, answers))

    def per_sequence(self, method: str, batch: TokenBatch, *args: object, what: str) -> Pending[torch.Tensor]:
        """Start a forward pass whose answer is a number per sequence, [B] in the order of the batch."""
        parts = balanced_parts(batch, self.group.mesh.data)
        refs = self.group.start_sharded(method, shards(batch, parts), *args)
        return self._answer(refs, what, lambda answers: reassemble_rows(parts, answers))

    def _answer(
        self, refs: Sequence[Any], what: str, combine: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> Pending[torch.Tensor]:
        """Return the call whose answer is made of those of one rank for each part of the batch."""
        mesh = self.group.mesh
        return Pending(self.group, refs, f"{self.name}: {what}", lambda answers: combine(mesh.one_per_part(answers)))


class ReferenceGroup(ForwardGroup):
    """The frozen reference or teacher."""

    def log_probs(
        self, batch: TokenBatch, temperature: float, what: str = "log-probs of the rollout"
    ) -> Pending[torch.Tensor]:
        """Start to compute the log-probs of the masked tokens, [T]; 0 elsewhere."""
        return self.per_token("log_probs", batch, temperature, what=what)


class UpdatedGroup(ForwardGroup, TrainedGroup):
    """The ranks of a model that is trained on rollouts."""

    def train(
        self, batch: TokenBatch, steps: Sequence[Sequence[int]], *args: object, what: str
    ) -> Pending[dict[str, float]]:
        """Start the optimiser steps, each on its sequences of `batch`; the answer is the mean of each metric over
        them."""
        refs = self.group.start_sharded("update", split(batch, steps, self.group.mesh.data), *args)
        return Pending(self.group, refs, f"{self.name}: {what}", lambda answers: answers[0])


class PolicyGroup(UpdatedGroup, ReferenceGroup):
    """The policy."""

    def log_probs_and_entropies(self, batch: TokenBatch, temperature: float) -> Pending[torch.Tensor]:
        """Start to compute the log-probs and the entropies of the masked tokens, [T, 2]; 0 elsewhere."""
        return self.per_token("log_probs_and_entropies", batch, temperature, what="log-probs of the rollout")

    def update(
        self, batch: TokenBatch, steps: Sequence[Sequence[int]], first_step: int, kl_coef: float, what: str
    ) -> Pending[dict[str, float]]:
        """Start optimiser steps on sequences of `batch`, the first one at `first_step` of the schedule."""
        return self.train(batch, steps, first_step, kl_coef, what=what)

    def open_sender(self, backend: str, check: bool, timeout_s: float, keep: bool) -> tuple[str, int]:
        """Prepare rank 0 to send weights, and return the (host, port) where it meets the engines. With `check` every
        tensor is sent with its digest; with `keep` what was sent last stays in memory."""
        started = self.begin("open_sender", backend, check, timeout_s, keep, what="preparing to send weights")
        address: tuple[str, int] = started.result()
        return address

    def join_sender(self, host: str, port: int) -> None:
        """Prepare the other ranks to send too, each to the engine on its own GPU."""
        self.begin("join_sender", host, port, what="preparing to send weights").result()

    def connect_sender(self, world_size: int, meeting: int) -> Pending[None]:
        """Start to wait for the workers of the engines."""
        return self.begin("connect_sender", world_size, meeting, what="meeting the engines")

    def publish(self, version: int) -> Pending[Manifest]:
        """Start to send all weights."""
        return self.begin("publish", version, what=f"sending the weights of version {version}")

    def publish_again(self, version: int) -> Pending[Manifest]:
        """Start to send the weights of the last sync, of `version`, again."""
        return self.begin("publish_again", version, what=f"sending the weights of version {version} again")

    def release(self) -> Pending[None]:
        """Start to free what the last sync took."""
        return self.begin("release", what="freeing what was sent")


class CriticGroup(UpdatedGroup):
    """The value model."""

    def values(self, batch: TokenBatch) -> Pending[torch.Tensor]:
        """Start to compute the state values at the model tokens, [T]."""
        return self.per_token("values", batch, what="values of the rollout")

    def update(
        self, batch: TokenBatch, steps: Sequence[Sequence[int]], first_step: int, what: str
    ) -> Pending[dict[str, float]]:
        """Start optimiser steps on sequences of `batch`, the first one at `first_step` of the schedule."""
        return self.train(batch, steps, first_step, what=what)


class RewardGroup(ForwardGroup):
    """The reward model."""

    def scores(self, batch: TokenBatch) -> Pending[torch.Tensor]:
        """Start to compute what the model says of each sequence, [B]."""
        return self.per_sequence("scores", batch, what="scores")


class ProcessRewardGroup(ForwardGroup):
    """The process reward model."""

    def probabilities(self, batch: TokenBatch, columns: list[int]) -> Pending[torch.Tensor]:
        """Start to compute P(good) at the masked tokens, [T]; the batch holds the tokens of the model itself."""
        return self.per_token("probabilities", batch, columns, what="probabilities of steps")
