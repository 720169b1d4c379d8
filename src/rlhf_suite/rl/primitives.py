"""The policy trained call by call: a program asks for gradients, updates and losses one by one (`rl.client`).

Every call is a part of what an optimiser step of task=ppo does (`train.step`), with the same micro-batches and sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlhf_suite.config.declarations.algo import KLConfig
from rlhf_suite.config.declarations.models import ActorConfig, AdamConfig
from rlhf_suite.config.plan.micro_batches import trained_micro_batches
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.batch import take
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.group import Pending
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.losses.tokens import next_token_loss
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.rl.model_groups import PolicyGroup
from rlhf_suite.rl.objectives import PolicyObjective
from rlhf_suite.rl.roles import PolicyRole, WorkerSettings
from rlhf_suite.rl.sharding import Division, balanced_parts, shards
from rlhf_suite.train.kept_state import KeptState, copy_state, drop_gradients, put_state
from rlhf_suite.train.step import Accumulated, accumulate, update
from rlhf_suite.train.task import Forward, Objective, StepLoss

CROSS_ENTROPY = "cross_entropy"  # every other loss is a policy loss, by its name


@dataclass(frozen=True)
class LossRequest:
    """Which loss a pass computes."""

    name: str
    kl_coef: float
    counts: Mapping[str, float] | None  # of each unit, by which its sum is divided; None: those of the batch
    changes: Mapping[str, Any] = field(default_factory=dict)  # flags of `actor` that this pass sees otherwise
    temperature: float | None = None  # at which a policy loss computes log-probs; None: rollout.temperature


@dataclass
class TokenObjective:
    """Minimise the mean next-token loss at temperature 1, each token with its weight (the column `correction`)."""

    def units(self, batch: Experience) -> dict[str, torch.Tensor]:
        return {"tokens": batch.mask.sum()}

    def loss(self, model: Forward, batch: Experience) -> StepLoss:
        log_probs = token_log_probs(model, batch, masked=True).log_probs
        return StepLoss.of("tokens", next_token_loss(log_probs, batch.mask, batch.correction))


def make_objective(
    request: LossRequest, actor: ActorConfig, kl: KLConfig, temperature: float, horizon: int
) -> Objective[Experience]:
    """Return what a pass minimises: the next-token loss, or a policy loss with the terms that the flags add to it."""
    if request.name == CROSS_ENTROPY:
        return TokenObjective()
    actor = replace(actor, policy_loss_type=request.name, **request.changes)
    temperature = temperature if request.temperature is None else request.temperature
    return PolicyObjective(actor, kl, temperature, horizon, kl_coef=request.kl_coef)


@dataclass
class Recorded:
    """An objective that keeps what it came to: the log-probs of every micro-batch, [T] each without gradient, and the
    sums of its losses."""

    objective: Objective[Experience]
    log_probs: list[torch.Tensor] = field(default_factory=list)
    sums: list[torch.Tensor] = field(default_factory=list)

    def units(self, batch: Experience) -> dict[str, torch.Tensor]:
        return self.objective.units(batch)

    def loss(self, model: Forward, batch: Experience) -> StepLoss:
        def forward(*args: Any, **options: Any) -> Any:
            outputs: Any = model(*args, **options)
            self.log_probs.append(outputs.log_probs.detach())
            return outputs

        loss = self.objective.loss(forward, batch)
        self.sums += [total.detach().double() for total in loss.sums.values()]
        return loss


@dataclass(frozen=True)
class Answer:
    """What a pass came to on one rank."""

    metrics: dict[str, float]  # of all ranks
    division: Division
    log_probs: list[torch.Tensor]  # of its micro-batches
    loss_sum: float  # of its sequences, not divided


PassResult = tuple[dict[str, float], torch.Tensor, float]  # metrics, log-probs [T], the sum of the losses


class SteppedPolicyRole(PolicyRole):
    """One rank of a policy that is trained call by call."""

    def __init__(self, rank: Rank, model: ModelPlan, settings: WorkerSettings, *more: Any) -> None:
        super().__init__(rank, model, settings, *more)
        self.accumulated: list[Accumulated] = []  # since the last update
        self.kept: dict[str, KeptState] = {}  # of models that take turns, by name

    def forward_backward(self, batch: Experience, request: LossRequest) -> Answer:
        """Add the gradient of a loss to those that wait for the next update. Return metrics and log-probs."""
        with self.awake():
            return self.compute_loss(batch, request, backward=True)

    @torch.no_grad()
    def measure_loss(self, batch: Experience, request: LossRequest) -> Answer:
        """Return metrics and log-probs, without dropout and without a gradient."""
        self.model.module.eval()
        try:
            return self.compute_loss(batch, request, backward=False)
        finally:
            self.model.module.train()

    def compute_loss(self, batch: Experience, request: LossRequest, *, backward: bool) -> Answer:
        """Compute a loss in the micro-batches of an optimiser step."""
        policy = self.policy_objective
        objective = Recorded(make_objective(request, policy.actor, policy.kl, policy.temperature, policy.horizon))
        groups = self.divide(batch, trained_micro_batches(self.settings.train))
        micro_batches = [take(batch, group) for group in groups]
        done = accumulate(self.model, objective, micro_batches, request.counts, backward=backward)
        if backward:
            self.accumulated.append(done)
        metrics = {f"train/{name}": value for name, value in self.world.combine(done.metrics).items()}
        log_probs = [part.cpu() for part in objective.log_probs[: len(groups)]]
        return Answer(metrics, Division(batch.lengths, groups), log_probs, float(sum(objective.sums)))

    def optim_step(self, step: int, adam: AdamConfig, rate: float | None, max_norm: float) -> dict[str, float]:
        """Update once, as the optimiser step `step` (from 0) of the schedule or at the learning rate `rate`."""
        accumulated, self.accumulated = self.accumulated, []
        for group in self.model.optimizer.param_groups if self.model.config.optim == "adam" else ():
            group["betas"], group["eps"] = (adam.betas[0], adam.betas[1]), adam.eps
            group["weight_decay"] = adam.weight_decay if group.get("decays", True) else 0.0
        self.model.clip_to(max_norm)
        with self.awake():
            result = update(self.model, accumulated, step, self.settings.train.on_nonfinite, rate=rate)
        if not result["skipped"]:
            self.follow_update()
        return {f"train/{self.prefix}{name}": value for name, value in result.items()}

    def keep_state(self, name: str, with_optimizer: bool) -> None:
        """Keep a copy of the weights, and of the optimiser's state, in memory under a name."""
        with self.awake():
            self.kept[name] = copy_state(self.model, with_optimizer=with_optimizer)

    def put_state(self, name: str, with_optimizer: bool) -> None:
        """Go on from what was kept under a name, or from its weights alone. Gradients that wait are dropped."""
        with self.awake():
            if self.accumulated:
                drop_gradients(self.model)
                self.accumulated = []
            put_state(self.model, self.kept[name], with_optimizer=with_optimizer)

    def forget_state(self, name: str) -> None:
        """Drop what was kept under a name."""
        self.kept.pop(name, None)


class SteppedPolicyGroup(PolicyGroup):
    """The ranks of a policy that is trained call by call."""

    def forward_backward(self, batch: Experience, request: LossRequest) -> Pending[PassResult]:
        """Start to add a gradient; the answer has metrics, the log-probs of the masked tokens, [T], and the sum of
        the losses."""
        return self.compute("forward_backward", batch, request, "a forward and backward pass")

    def measure_loss(self, batch: Experience, request: LossRequest) -> Pending[PassResult]:
        """Start to compute a loss alone; the answer is that of `forward_backward`."""
        return self.compute("measure_loss", batch, request, "a forward pass")

    def compute(self, method: str, batch: Experience, request: LossRequest, activity: str) -> Pending[PassResult]:
        """Start a pass over a batch that is divided as an optimiser step divides it."""
        mesh = self.group.mesh
        division = Division(batch.lengths, balanced_parts(batch, mesh.data))
        refs = self.group.start_sharded(method, shards(batch, division.parts), request)

        def combine(answers: list[Answer]) -> PassResult:
            parts = mesh.one_per_part(answers)
            log_probs = division.per_token([part.division.per_token(part.log_probs) for part in parts])
            return answers[0].metrics, log_probs, sum(part.loss_sum for part in parts)

        return Pending(self.group, refs, f"{self.name}: {activity}", combine)

    def optim_step(self, step: int, adam: AdamConfig, rate: float | None, max_norm: float) -> Pending[dict[str, float]]:
        """Start an update with the gradients that were added."""
        return self.submit("optim_step", step, adam, rate, max_norm, activity=f"optimiser step {step + 1}")

    def keep_state(self, name: str, *, with_optimizer: bool = True) -> Pending[None]:
        """Start to keep a copy of weights and optimiser in memory."""
        return self.submit("keep_state", name, with_optimizer, activity="keeping its state")

    def put_state(self, name: str, *, with_optimizer: bool = True) -> Pending[None]:
        """Start to go on from what was kept under a name."""
        return self.submit("put_state", name, with_optimizer, activity="changing its state")

    def forget_state(self, name: str) -> Pending[None]:
        """Start to drop what was kept under a name."""
        return self.submit("forget_state", name, activity="dropping a state")
