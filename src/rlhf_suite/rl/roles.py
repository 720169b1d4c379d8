"""The models of a run as worker classes: policy, critic, reference, teacher, reward model. One instance per rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from rlhf_suite.config.models import TrainedModelConfig
from rlhf_suite.config.reward import reward_model
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.distributed.workers import Worker
from rlhf_suite.distributed.world import seed_process
from rlhf_suite.models.forward import sequence_scores, token_log_probs, token_values
from rlhf_suite.models.load import DTYPES, load_tokenizer
from rlhf_suite.models.process_reward_model import step_probabilities
from rlhf_suite.models.weights import named_weights
from rlhf_suite.rl.objectives import PolicyObjective, ValueObjective
from rlhf_suite.rl.sharding import forward_groups, in_micro_batches, reassemble, reassemble_rows
from rlhf_suite.train.ema import WeightAverage
from rlhf_suite.train.loader import micro_groups
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.strategy import join_world, load_frozen, load_trained
from rlhf_suite.train.task import Objective
from rlhf_suite.train.trained_worker import TrainedWorker
from rlhf_suite.weight_sync.digests import Manifest
from rlhf_suite.weight_sync.sender import IpcSender, Sender, ShmSender, StreamSender

STEP_RESULTS = ("lr", "grad_norm", "skipped", "aux_loss")  # names that policy and critic share


class Role(Worker):
    """What all roles share: the ranks they work with, and forward passes in micro-batches."""

    def __init__(self, rank: Rank, config: PPORun) -> None:
        super().__init__(rank)
        self.config = config
        self.world = join_world(rank)
        seed_process(config.train, rank.number)

    @torch.no_grad()
    def forward(
        self, batch: TokenBatch, compute: Callable[[TokenBatch], torch.Tensor]
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """`compute` of each micro-batch of this rank's shard."""
        rollout, train = self.config.rollout, self.config.train
        budget = (rollout.max_tokens_per_gpu or train.max_tokens_per_gpu) if train.dynamic_batch_enable else None
        groups = forward_groups(batch, rollout.micro_batch_size, budget)
        rounds = int(self.world.max(torch.tensor(float(len(groups)))))
        return groups, in_micro_batches(batch, groups, rounds, lambda part: compute(part.to(self.world.device)))

    def masked_log_probs(self, model: Callable[..., Any], batch: TokenBatch, temperature: float) -> torch.Tensor:
        """Log-probs of the masked tokens, [T] in the order of the shard; 0 elsewhere."""

        def compute(part: TokenBatch) -> torch.Tensor:
            needed = part.mask.bool()
            return token_log_probs(model, part, temperature=temperature, needed=needed).log_probs

        groups, results = self.forward(batch, compute)
        return reassemble(batch, groups, results)


class ReferenceRole(Role):
    """The frozen reference policy."""

    section = "ref"

    def __init__(self, rank: Rank, config: PPORun) -> None:
        super().__init__(rank, config)
        section = getattr(config, self.section)
        path = section.model_name_or_path or config.actor.model_name_or_path
        assert path is not None
        flag = f"{self.section}.model_name_or_path"
        self.model = load_frozen(path, "lm", config.ds, self.world, flag, section.offload)

    def log_probs(self, batch: TokenBatch, temperature: float) -> torch.Tensor:
        """As the policy's."""
        return self.masked_log_probs(self.model, batch, temperature)


class TeacherRole(ReferenceRole):
    """The frozen teacher of on-policy distillation."""

    section = "teacher"


class RewardRole(Role):
    """The frozen reward model: one score per sequence, at its last token."""

    def __init__(self, rank: Rank, config: PPORun) -> None:
        super().__init__(rank, config)
        path = reward_model(config.reward)
        assert path is not None
        flag = "reward.model_name_or_path"
        self.model = load_frozen(path, "value", config.ds, self.world, flag, config.reward.offload)

    def scores(self, batch: TokenBatch) -> torch.Tensor:
        """[B], as the model gives them."""
        groups, results = self.forward(batch, lambda part: sequence_scores(self.model, part))
        return reassemble_rows(groups, results)


class ProcessRole(Role):
    """The frozen process reward model: P(good) of every step."""

    def __init__(self, rank: Rank, config: PPORun) -> None:
        super().__init__(rank, config)
        path = config.reward.process.model_name_or_path
        assert path is not None
        self.model = load_frozen(path, "lm", config.ds, self.world, "reward.process.model_name_or_path")

    def probabilities(self, batch: TokenBatch, columns: list[int]) -> torch.Tensor:
        """At the masked tokens, [T] in the order of the shard; the batch holds the model's own tokens."""
        groups, results = self.forward(batch, lambda part: step_probabilities(self.model, part, columns))
        return reassemble(batch, groups, results)


class TrainedRole(Role, TrainedWorker):
    """A model that is trained on rollouts."""

    objective: Objective[Experience]
    prefix: str

    def build(self, section: TrainedModelConfig, head: Literal["lm", "value"], total_steps: int, flag: str) -> None:
        """Load the model of `section` and put it under DeepSpeed."""
        config = self.config
        assert config.actor.model_name_or_path is not None
        self.tokenizer = load_tokenizer(config.actor.model_name_or_path, config.data)
        self.model = load_trained(
            section,
            head,
            config.ds,
            self.world,
            total_steps=total_steps,
            seed=config.train.seed,
            flag=flag,
        )

    def forward(
        self, batch: TokenBatch, compute: Callable[[TokenBatch], torch.Tensor]
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """As every role's, without dropout: what is measured is the model, not one draw of it."""
        self.model.module.eval()
        try:
            return super().forward(batch, compute)
        finally:
            self.model.module.train()

    def updated(self) -> None:
        """An optimiser step has changed the weights."""

    def train(self, batches: list[Experience], first_step: int) -> dict[str, float]:
        """One optimiser step per batch; the mean of each metric over them."""
        rows = []
        for offset, batch in enumerate(batches):
            groups = micro_groups(batch.lengths.tolist(), self.config.train)
            micro_batches = [take(batch, group) for group in groups]
            step = first_step + offset
            row = optimizer_step(self.model, self.objective, micro_batches, step, self.config.train.on_nonfinite)
            rows.append(row)
            if not row["skipped"]:
                self.updated()
        found = {name: [row[name] for row in rows if name in row] for row in rows for name in row}
        means = {name: sum(values) / len(values) for name, values in found.items()}
        result = {f"train/{self.prefix}{k}" if k in STEP_RESULTS else f"train/{k}": v for k, v in means.items()}
        return result | {f"perf/{self.prefix}memory_gb": self.world.peak_memory_gb()}


class PolicyRole(TrainedRole):
    """The policy: log-probs, updates, and its weights for the engines."""

    prefix = "actor_"
    objective: PolicyObjective
    sender: Sender | None = None

    def __init__(self, rank: Rank, config: PPORun, total_steps: int) -> None:
        super().__init__(rank, config)
        self.build(config.actor, "lm", total_steps, "actor.model_name_or_path")
        horizon = config.rollout.max_new_tokens or config.data.max_len
        self.objective = PolicyObjective(config.actor, config.algo.kl, config.rollout.temperature, horizon)
        self.average = WeightAverage(self.model, config.train.ema_beta) if config.train.enable_ema else None

    def log_probs(self, batch: TokenBatch, temperature: float) -> torch.Tensor:
        """Of the masked tokens, [T] in the order of the shard."""
        return self.masked_log_probs(self.model, batch, temperature)

    def update(self, batches: list[Experience], first_step: int, kl_coef: float) -> dict[str, float]:
        self.objective.kl_coef = kl_coef
        return self.train(batches, first_step)

    def updated(self) -> None:
        if self.average is not None:
            self.average.update()

    def save_state(self, folder: Path) -> None:
        super().save_state(folder)
        if self.average is not None:
            self.average.save_state(folder)

    def load_state(self, folder: Path) -> None:
        super().load_state(folder)
        if self.average is not None:
            self.average.load_state(folder)

    def export(self, path: Path) -> None:
        """The policy, and beside it as `<path>_ema` the average of its weights."""
        super().export(path)
        if self.average is not None:
            with self.average.in_place():
                super().export(path.with_name(f"{path.name}_ema"))

    def open_sender(self, backend: str) -> tuple[str, int]:
        """Prepare rank 0 to send weights; gives (host, port) of the rendezvous."""
        self.host = os.environ["MASTER_ADDR"]
        return self.host, self._open(backend, 0) if self.world.is_main else 0

    def join_sender(self, host: str, port: int) -> None:
        """With ipc every rank sends, to the engine on its own GPU."""
        if not self.world.is_main:
            self._open("ipc", port)

    def _open(self, backend: str, port: int) -> int:
        dtype, check = DTYPES[self.config.ds.param_dtype], self.config.vllm.sync_check != "off"
        timeout_s = self.config.launch.timeout_s
        if backend == "shm":
            self.sender = ShmSender(dtype, check)
            return 0
        if backend == "ipc":
            self.sender = IpcSender(dtype, check, self.host, port, timeout_s)
        else:
            self.sender = StreamSender(backend, dtype, check, self.host, timeout_s)
        return self.sender.port

    def connect_sender(self, world_size: int) -> None:
        """Meet the engines' workers."""
        if isinstance(self.sender, StreamSender):
            self.sender.connect(world_size)

    def publish(self, version: int) -> Manifest | None:
        """Send all weights, named as in an HF checkpoint; every rank gathers, those with a sender send."""
        weights = named_weights(self.model.module, self.model.gathered)
        if self.sender is not None:
            return self.sender.send(version, weights)
        for _ in weights:
            pass
        return None

    def release(self) -> None:
        """The engines have loaded the weights."""
        if self.sender is not None:
            self.sender.release()


class CriticRole(TrainedRole):
    """The value model."""

    prefix = "critic_"

    def __init__(self, rank: Rank, config: PPORun, total_steps: int) -> None:
        super().__init__(rank, config)
        self.build(config.critic, "value", total_steps, "critic.model_name_or_path")
        self.objective = ValueObjective(config.critic)

    def values(self, batch: TokenBatch) -> torch.Tensor:
        """State values at the model tokens, [T] in the order of the shard."""
        groups, results = self.forward(batch, lambda part: token_values(self.model, part) * part.mask)
        return reassemble(batch, groups, results)

    def update(self, batches: list[Experience], first_step: int) -> dict[str, float]:
        return self.train(batches, first_step)
