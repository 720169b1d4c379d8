"""The models of a run as worker classes: policy, critic, reference, teacher. One instance per rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlhf_suite.config.declarations.algo import KLConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import ActorConfig, CriticConfig, TrainedModelConfig
from rlhf_suite.config.declarations.rollout import RolloutConfig
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.config.plan.micro_batches import MicroBatches, rollout_micro_batches, trained_micro_batches
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.distributed.worker import Worker, keep_from_collections
from rlhf_suite.distributed.world import seed_process
from rlhf_suite.models.adapters import iterate_adapters
from rlhf_suite.models.forward import LanguageModel, ScalarModel, token_log_probs, token_values
from rlhf_suite.models.host_weights import on_device
from rlhf_suite.models.load import DTYPES, load_tokenizer
from rlhf_suite.models.prefixes import find_neighbours
from rlhf_suite.models.prompt_format import PromptFormat
from rlhf_suite.models.weights import iterate_weights
from rlhf_suite.rl.documents import WithDocuments, load_documents
from rlhf_suite.rl.objectives import PolicyObjective, ValueObjective
from rlhf_suite.rl.sharding import Division, in_micro_batches
from rlhf_suite.train.checkpoint_files import Entries
from rlhf_suite.train.ema import WeightAverage
from rlhf_suite.train.frozen import WithoutAdapters
from rlhf_suite.train.loader import StepLoader, micro_groups
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.strategy import join_world, load_frozen, load_trained
from rlhf_suite.train.task import Objective
from rlhf_suite.train.trained_worker import TrainedWorker
from rlhf_suite.weight_sync.digests import ADAPTER, BASE, WHOLE, Manifest
from rlhf_suite.weight_sync.sender import IpcSender, Sender, ShmSender, StreamSender

OF_FIRST_STEP = "rerouted"  # compares the policy with the engines: later steps of an update see one that has moved
STEP_RESULTS = ("lr", "grad_norm", "skipped", "aux_loss")  # names that policy and critic share


@dataclass(frozen=True)
class WorkerSettings:
    """The sections of flags that the workers of every model read."""

    ds: DeepSpeedConfig
    train: TrainConfig
    rollout: RolloutConfig
    data: DataConfig
    tokenizer: str  # the folder or hub name of the tokenizer that is saved with each model

    @property
    def micro_batches(self) -> MicroBatches:
        """What forward passes over a rollout take at once."""
        return rollout_micro_batches(self.rollout, self.train)


class Role(Worker):
    """What the ranks of all models share: the ranks they work with, and forward passes in micro-batches."""

    model: Any

    def __init__(self, rank: Rank, ds: DeepSpeedConfig, micro_batches: MicroBatches, train: TrainConfig | None) -> None:
        super().__init__(rank)
        self.micro_batches = micro_batches
        self.world = join_world(rank, ds.zero_stage)
        if train is not None:
            seed_process(train, self.world)

    @property
    def module(self) -> LanguageModel | ScalarModel:
        """Return the model of this role without an engine around it."""
        module: LanguageModel | ScalarModel = getattr(self.model, "module", self.model)
        return module

    def divide(self, batch: TokenBatch, limit: MicroBatches) -> list[list[int]]:
        """Return which sequences of this rank's shard share a micro-batch."""
        order = find_neighbours(self.module, batch)
        return micro_groups(batch.lengths.tolist(), limit, self.world.mesh, self.module.packed, order)

    @torch.no_grad()
    def forward(
        self, batch: TokenBatch, compute: Callable[[TokenBatch], torch.Tensor]
    ) -> tuple[Division, list[torch.Tensor]]:
        """Return how this rank's shard is divided into micro-batches, and `compute` of each of them."""
        groups = self.divide(batch, self.micro_batches)
        rounds = int(self.world.max(torch.tensor(float(len(groups)))))
        with on_device(self.model):
            results = in_micro_batches(batch, groups, rounds, lambda part: compute(part.to(self.world.device)))
        return Division(batch.lengths, groups), results

    def compute_log_probs(
        self, model: Callable[..., Any], batch: TokenBatch, temperature: float, entropy: bool = False
    ) -> torch.Tensor:
        """Return the log-probs of the masked tokens, [T] in the order of the shard; 0 elsewhere. With `entropy`, the
        entropies in nats beside them, [T, 2]."""

        def compute(part: TokenBatch) -> torch.Tensor:
            log_probs = token_log_probs(model, part, temperature=temperature, entropy=entropy, masked=True)
            return (
                log_probs.log_probs
                if log_probs.entropy is None
                else torch.stack([log_probs.log_probs, log_probs.entropy], 1)
            )

        division, results = self.forward(batch, compute)
        return division.per_token(results)


def never_sample_images(model: object) -> None:
    """Give the tokens of images no probability, as the engines do."""
    assert isinstance(model, LanguageModel)
    model.never_sample_images()


class ReferenceRole(Role):
    """The reference policy, or the teacher of on-policy distillation."""

    def __init__(self, rank: Rank, model: ModelPlan, settings: WorkerSettings) -> None:
        super().__init__(rank, settings.ds, settings.micro_batches, settings.train)
        self.model = load_frozen(model, settings.ds, self.world)
        if settings.data.image_key is not None:
            never_sample_images(getattr(self.model, "module", self.model))

    def log_probs(self, batch: TokenBatch, temperature: float) -> torch.Tensor:
        """Return the log-probs of the masked tokens, [T], computed as `PolicyRole.log_probs` does."""
        return self.compute_log_probs(self.model, batch, temperature)


class TrainedRole(Role, TrainedWorker):
    """A model that is trained on rollouts. `total_steps`: optimiser steps of the run, for the schedule."""

    objective: Objective[Any]
    prefix: str

    def __init__(
        self, rank: Rank, model: ModelPlan, settings: WorkerSettings, section: TrainedModelConfig, total_steps: int
    ) -> None:
        super().__init__(rank, settings.ds, settings.micro_batches, settings.train)
        self.settings = settings
        self.tokenizer = load_tokenizer(settings.tokenizer, settings.data)
        self.prompts = PromptFormat.of(settings.data)
        seed = settings.train.seed
        self.model = load_trained(model, section, settings.ds, self.world, total_steps=total_steps, seed=seed)
        if settings.ds.enable_sleep:
            self.model.optimizer_to_host()
        keep_from_collections()

    def awake(self) -> AbstractContextManager[None]:
        """Return a context in which the whole state of the model is on its device (ds.enable_sleep)."""
        return self.model.optimizer_on_device() if self.settings.ds.enable_sleep else nullcontext()

    def save_state(self, folder: Path, with_optimizer: bool) -> Entries:
        with self.awake():
            return super().save_state(folder, with_optimizer)

    def load_state(self, folder: Path, with_optimizer: bool) -> None:
        with self.awake():
            super().load_state(folder, with_optimizer)

    def forward(
        self, batch: TokenBatch, compute: Callable[[TokenBatch], torch.Tensor]
    ) -> tuple[Division, list[torch.Tensor]]:
        """Do as `Role.forward` does, without dropout: what is measured is the model, not one draw of it."""
        self.model.module.eval()
        try:
            return super().forward(batch, compute)
        finally:
            self.model.module.train()

    def follow_update(self) -> None:
        """Do what follows an optimiser step that has changed the weights."""

    def beside(self, step: int) -> Sequence[TokenBatch]:
        """Return what an optimiser step trains on beside samples, in micro-batches."""
        return ()

    def train_step(self, batch: Experience, step: int) -> dict[str, float]:
        """Take an optimiser step and return its metrics."""
        groups = self.divide(batch, trained_micro_batches(self.settings.train))
        micro_batches = [*(take(batch, group) for group in groups), *self.beside(step)]
        row = optimizer_step(self.model, self.objective, micro_batches, step, self.settings.train.on_nonfinite)
        if not row["skipped"]:
            self.follow_update()
        return row

    def train(self, batches: list[Experience], first_step: int) -> dict[str, float]:
        """Take one optimiser step per batch, and return the mean of each metric over them."""
        with self.awake():
            rows = [self.train_step(batch, first_step + offset) for offset, batch in enumerate(batches)]
        for row in rows[1:]:
            row.pop(OF_FIRST_STEP, None)
        by_name = {name: [row[name] for row in rows if name in row] for row in rows for name in row}
        means = {name: sum(values) / len(values) for name, values in by_name.items()}
        result = {f"train/{self.prefix}{k}" if k in STEP_RESULTS else f"train/{k}": v for k, v in means.items()}
        return result | {f"perf/{self.prefix}memory_gb": self.world.peak_memory_gb()}


class PolicyRole(TrainedRole):
    """The policy: log-probs, updates, and its weights for the engines."""

    prefix = "actor_"
    sender: Sender | None = None
    base_sender: ShmSender | None = None  # of the model without its adapters, whose file may stay beside theirs

    def __init__(
        self,
        rank: Rank,
        model: ModelPlan,
        settings: WorkerSettings,
        actor: ActorConfig,
        kl: KLConfig,
        total_steps: int,
    ) -> None:
        super().__init__(rank, model, settings, actor, total_steps)
        if settings.data.image_key is not None:
            never_sample_images(self.model.module)
        rollout, train = settings.rollout, settings.train
        horizon = rollout.max_new_tokens or settings.data.max_len
        self.policy_objective = PolicyObjective(actor, kl, rollout.temperature, horizon)
        self.objective = self.policy_objective
        documents = load_documents(settings.data, self.tokenizer, train.seed)
        self.documents = None if documents is None else StepLoader(documents.windows, train, self.world)
        if documents is not None:
            self.objective = WithDocuments(self.policy_objective, actor.ptx_coef)
        self.average = WeightAverage(self.model, train.ema_beta) if train.enable_ema else None

    def log_probs(self, batch: TokenBatch, temperature: float) -> torch.Tensor:
        """Return the log-probs of the masked tokens, [T] in the order of the shard."""
        return self.compute_log_probs(self.model, batch, temperature)

    def log_probs_and_entropies(self, batch: TokenBatch, temperature: float) -> torch.Tensor:
        """Return the log-probs and the entropies of the masked tokens, [T, 2] in the order of the shard."""
        return self.compute_log_probs(self.model, batch, temperature, entropy=True)

    def log_probs_without_adapters(self, batch: TokenBatch, temperature: float) -> torch.Tensor:
        """Return the log-probs of the masked tokens as the model without its adapters gives them: those of the
        reference."""
        return self.compute_log_probs(WithoutAdapters(self.model), batch, temperature)

    def log_probs_of_average(self, batch: TokenBatch, temperature: float) -> torch.Tensor:
        """Return the log-probs of the masked tokens by the average of the weights, [T] in the order of the shard."""
        assert self.average is not None, "checked with the flags"
        with self.average.in_place():
            return self.log_probs(replace(batch, routes=None), temperature)

    def update(
        self, batches: list[Experience], first_step: int, kl_coef: float, entropy_coef: float | None
    ) -> dict[str, float]:
        """Take one optimiser step per batch, the first one at `first_step` of the schedule."""
        self.policy_objective.kl_coef = kl_coef
        self.policy_objective.adapted_entropy_coef = entropy_coef
        return self.train(batches, first_step)

    def beside(self, step: int) -> Sequence[TokenBatch]:
        return () if self.documents is None else self.documents.step(step, self.module.packed)

    def follow_update(self) -> None:
        if self.average is not None:
            self.average.update()

    def save_state(self, folder: Path, with_optimizer: bool) -> Entries:
        written = super().save_state(folder, with_optimizer)
        return written if self.average is None else written | self.average.save_state(folder)

    def load_state(self, folder: Path, with_optimizer: bool) -> None:
        super().load_state(folder, with_optimizer)
        if self.average is not None:
            self.average.load_state(folder)

    def export(self, path: Path) -> list[str]:
        """Write the policy in HF format, and beside it as `<path>_ema` the average of its weights."""
        problems = super().export(path)
        if self.average is not None:
            with self.average.in_place():
                problems += super().export(path.with_name(f"{path.name}_ema"))
        return problems

    def open_sender(self, backend: str, check: bool, timeout_s: float, keep: bool) -> tuple[str, int]:
        """Prepare rank 0 to send weights, and return the (host, port) where it meets the engines. With `check` every
        tensor is sent with its digest; with `keep` what was sent last stays in memory."""
        self.host, self.check, self.timeout_s, self.keep = os.environ["MASTER_ADDR"], check, timeout_s, keep
        self.sender = None  # of another backend, which does not work here
        if backend == "shm" and self.world.is_main and self.model.module.lora is not None:
            self.base_sender = ShmSender(DTYPES[self.settings.ds.precision], check, keep)
        return self.host, self._open(backend, 0) if self.world.is_main else 0

    def join_sender(self, host: str, port: int) -> None:
        """Prepare the other ranks to send by CUDA IPC, each to the engine on its own GPU."""
        if not self.world.is_main:
            self._open("ipc", port)

    def _open(self, backend: str, port: int) -> int:
        dtype = DTYPES[self.settings.ds.precision]
        if backend == "shm":
            self.sender = ShmSender(dtype, self.check, self.keep)
            return 0
        if backend == "ipc":
            self.sender = IpcSender(dtype, self.check, self.host, port, self.timeout_s)
        else:
            self.sender = StreamSender(backend, dtype, self.check, self.host, self.timeout_s, self.keep)
        return self.sender.port

    def connect_sender(self, world_size: int, meeting: int) -> str:
        """Wait until the workers of the engines have come; return why they cannot share memory with this rank, or
        ""."""
        return self.sender.connect(world_size, meeting) if isinstance(self.sender, StreamSender | IpcSender) else ""

    def publish(self, version: int, part: str = WHOLE) -> Manifest | None:
        """Send all weights or a part of them, named as in an HF checkpoint; every rank gathers, those with a sender
        send."""
        module, gather = self.model.module, self.model.gather
        if part == ADAPTER:
            weights = iterate_adapters(module.model, gather)
        else:
            weights = iterate_weights(module, gather, merges=part == WHOLE)
        sender = (part == BASE and self.base_sender) or self.sender
        if sender is not None:
            return sender.send(version, weights, part)
        for _ in weights:
            pass
        return None

    def publish_again(self, version: int, part: str = WHOLE) -> Manifest | None:
        """Send what the last sync, of `version`, has sent again: what was kept, else what the model has, which has not
        been trained since."""
        if isinstance(self.sender, StreamSender) and (sent := self.sender.send_again(version, part)) is not None:
            return sent
        is_kept = self.keep and part != BASE
        return None if is_kept and not self.world.is_main else self.publish(version, part)

    def release(self) -> None:
        """Free what the last sync took: the engines have loaded the weights."""
        for sender in (self.sender, self.base_sender):
            if sender is not None:
                sender.release()


class CriticRole(TrainedRole):
    """The value model."""

    prefix = "critic_"

    def __init__(
        self, rank: Rank, model: ModelPlan, settings: WorkerSettings, critic: CriticConfig, total_steps: int
    ) -> None:
        super().__init__(rank, model, settings, critic, total_steps)
        self.objective = ValueObjective(critic)

    def values(self, batch: TokenBatch) -> torch.Tensor:
        """Return the state values at the model tokens, [T] in the order of the shard."""
        division, results = self.forward(batch, lambda part: token_values(self.model, part) * part.mask)
        return division.per_token(results)

    def update(self, batches: list[Experience], first_step: int) -> dict[str, float]:
        """Take one optimiser step per batch, the first one at `first_step` of the schedule."""
        return self.train(batches, first_step)
