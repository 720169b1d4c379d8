"""The paths through the code for GPUs that benchmarks/fake_cuda.py walks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_rows import FLAGS, random_examples, supervised
from rlhf_suite.config.declarations.algo import KLConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import ActorConfig, CriticConfig, TrainedModelConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.sections import section_of
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.batch import Group, take
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.losses.metrics import Deviation, Mean, Quantile
from rlhf_suite.models.attention import SequenceLayout, varlen_attention
from rlhf_suite.models.attention_blocks import Block, States
from rlhf_suite.models.builtin import Shape, create
from rlhf_suite.models.head import LogitRule, ScoringHead, chunk_rows
from rlhf_suite.registry import policy_loss
from rlhf_suite.rl.objectives import PolicyObjective, ValueObjective
from rlhf_suite.rl.roles import MicroBatches, Role
from rlhf_suite.tasks import distill, dpo, kto, prm, rm, sft
from rlhf_suite.train.ema import WeightAverage
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.strategy import TrainedModel, load_trained
from rlhf_suite.train.torch_engine import MasterWeights
from rlhf_suite.weight_sync.buckets import join_parts, pack_buckets
from rlhf_suite.weight_sync.digests import as_digests, digest_sums

DEVICE = torch.device("cuda", 0)
LENGTHS = (5, 70, 1, 40, 9, 9, 33)
VARLEN = "_varlen_attn"
FLASH = ("_flash_attention_forward", "_flash_attention_backward")
STEP_READS = 2  # the norm of the gradient, and all metrics at once
Outputs = Iterable[Tensor]


@dataclass(frozen=True)
class Route:
    """A path. `walk` returns tensors that must be on the device, `reads` is how often the host reads the device on it,
    and `kernels` are operations that must run."""

    name: str
    walk: Callable[[], Outputs]
    reads: int = 0
    kernels: tuple[str, ...] = ()


def routes(folder: Path) -> Iterator[Route]:
    """Yield all paths. What one prepares is made on the device too, before it is walked."""
    path, mixture = str(folder / "tiny"), str(folder / "mixture")
    create(Path(path), Shape())
    create(Path(mixture), Shape(family="qwen3_moe"))
    yield from steps(path, mixture)
    yield from passes(path)
    yield from heads()
    yield from attentions()
    yield from ring_blocks()
    yield from syncs()
    yield from metrics()


def load(path: str, head: str = "lm", packed: bool = True, balance: float = 0.0) -> TrainedModel:
    """Return a bf16 model under torch alone, on the device, with checkpointing. `balance`: the weight of the loss that
    balances its experts."""
    world = World(0, Mesh(1), DEVICE)
    config = TrainedModelConfig.of(
        "ppo", model_name_or_path=path, gradient_checkpointing_enable=True, aux_loss_coef=balance
    )
    ds = DeepSpeedConfig.of("sft", zero_stage=None, packing_samples=packed, param_dtype="bf16")
    return load_trained(ModelPlan("actor", path, head=head), config, ds, world, total_steps=100, seed=0)


def rollout() -> Experience:
    """Return sequences in host memory with every column that an objective reads."""
    generator = torch.Generator().manual_seed(5)
    total, count = sum(LENGTHS), len(LENGTHS)
    names = ("old_log_probs", "engine_log_probs", "ref_log_probs", "values", "returns", "advantages")
    numbers = {name: torch.randn(total, generator=generator) - 5 for name in names}
    return Experience(
        torch.randint(16, 256, (total,), generator=generator),
        torch.tensor(LENGTHS),
        (torch.rand(total, generator=generator) > 0.3).float(),
        index=torch.arange(count),
        correction=torch.rand(total, generator=generator),
        chosen=torch.rand(total, generator=generator) > 0.9,
        **numbers,
    )


# Training.


def steps(path: str, mixture: str) -> Iterator[Route]:
    """Yield optimiser steps: forward with checkpointing, backward, the norm, AdamW, metrics. `mixture`: a model with
    experts."""
    batch, parts = rollout(), ([*range(7)], [0, 1], [2, 3], [4], [5, 6])

    def step(model: TrainedModel, objective: Any, rows: Iterable[list[int]]) -> Callable[[], Outputs]:
        def walk() -> Outputs:
            optimizer_step(model, objective, [take(batch, part) for part in rows], 0, "skip")
            return held(model)

        walk()  # the first step also makes the states of the optimiser
        return walk

    model, kernels = load(path), (VARLEN, "_varlen_attn_backward", "_fused_adamw_")
    for name in policy_loss.names():
        yield Route(f"policy step, loss {name}", step(model, policy(name), parts[:1]), STEP_READS, kernels)
    yield Route("policy step of 4 micro-batches", step(model, policy("ppo"), parts[1:]), STEP_READS, kernels)
    yield Route("average of weights after a step", averaged(model), len([*model.module.parameters()]))
    yield Route("policy step, padded rows", step(load(path, packed=False), policy("ppo"), parts[1:]), STEP_READS)
    values = load(path, head="value")
    yield Route("value step", step(values, ValueObjective(CriticConfig.of("ppo")), parts[:1]), STEP_READS, kernels)
    experts = load(mixture, balance=0.01)
    yield Route("policy step, balanced experts", step(experts, policy("ppo"), parts[1:]), STEP_READS, kernels)
    yield from supervised_steps(path, kernels)


def policy(loss: str) -> PolicyObjective:
    """Return the objective of the policy with all of its terms."""
    actor = ActorConfig.of("ppo", policy_loss_type=loss, entropy_coef=0.1)
    return PolicyObjective(actor, KLConfig(use_loss=True, estimator="k3"), 0.9, 64, 0.1)


def supervised_steps(path: str, kernels: tuple[str, ...]) -> Iterator[Route]:
    """Yield steps of the workers of all supervised tasks, of two micro-batches each."""
    flags = {**FLAGS, "actor.model_name_or_path": path, "train.batch_size": 4, "train.micro_batch_size": 2}
    flags |= {"ds.grad_accum_dtype": None, "data.max_len": 40}
    rows = random_examples(16, 40)
    pairs = [Group((rows[i], rows[i + 1])) for i in range(0, 16, 2)]
    labels = {name: [0.0] * 20 + [1.0] * 20 for name in ("target", "weight")}
    for name, task, more, items, reads in (
        ("sft", sft, {"actor.pretrain_mode_enable": True}, rows, STEP_READS),
        ("rm", rm, {}, pairs, STEP_READS + 1),
        ("dpo", dpo, {}, pairs, STEP_READS + 1),
        (
            "kto",
            kto,
            {},
            [replace(row, numbers={"label": i % 2}) for i, row in enumerate(rows)],
            STEP_READS + 2,
        ),
        (
            "prm",
            prm,
            {"algo.placeholder_token": ";", "algo.reward_tokens": ["+", "-"]},
            [replace(row, token_numbers=labels) for row in rows],
            STEP_READS + 1,
        ),
        (
            "distill",
            distill,
            {"teacher.model_name_or_path": path, "data.output_key": "output"},
            rows,
            STEP_READS + 1,
        ),
    ):
        step, model = supervised(section_of(Run, name, flags | more), task.make_task, items, DEVICE.type)
        step(0)
        yield Route(f"{name} step", partial(after, partial(step, 1), model), reads, kernels)


def after(walk: Callable[[], object], model: TrainedModel) -> Outputs:
    walk()
    return held(model)


def held(model: TrainedModel) -> Outputs:
    """Return the weights of a model, their masters and the states of the optimiser."""
    masters: MasterWeights = model.optimizer
    states = [value for state in masters.optimizer.state.values() for value in state.values()]
    return [*model.module.parameters(), *masters.masters.values(), *states]


def averaged(model: TrainedModel) -> Callable[[], Outputs]:
    """Return an update of the average of a model's weights, which is in host memory."""
    average = WeightAverage(model, 0.9)

    def walk() -> Outputs:
        average.update()
        return model.module.parameters()

    return walk


# Forward passes.


def passes(path: str) -> Iterator[Route]:
    """Yield forward passes without gradients."""
    model, batch = load(path), rollout()
    role = Role.__new__(Role)  # a worker without a process around it
    role.model, role.world, role.micro_batches = model, model.world, MicroBatches(rows=2)

    def score() -> Outputs:
        role.compute_log_probs(model, batch, 0.9, entropy=True)
        return model.module.parameters()

    yield Route("log-probs and entropies of a rollout", score, 1, (VARLEN,))


def heads() -> Iterator[Route]:
    """Yield the chunked head, forward and backward, over several chunks."""
    rows, width, vocabulary = 5000, 64, 4096
    assert rows > 2 * chunk_rows(vocabulary)

    def walk(rule: LogitRule) -> Outputs:
        head = ScoringHead.of(torch.nn.Linear(width, vocabulary, device=DEVICE, dtype=torch.bfloat16), rule)
        hidden = torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        log_probs, entropy = head(hidden, torch.zeros(rows, dtype=torch.int64, device=DEVICE), 0.7, entropy=True)
        (log_probs.sum() + entropy.sum()).backward()
        return log_probs, entropy, hidden.grad, head.weight.grad, head.bias.grad

    yield Route("chunked head with entropy", partial(walk, LogitRule()))
    yield Route("chunked head with a scale and a cap", partial(walk, LogitRule(0.5, 30.0)))


def attentions() -> Iterator[Route]:
    """Yield the dispatch of attention, forward and backward, by what a layer asks for."""
    sequences = SequenceLayout.of(torch.tensor(LENGTHS, device=DEVICE), True, None, torch.tensor(LENGTHS))
    module = torch.nn.Module()

    def walk(dtype: torch.dtype, **settings: Any) -> Outputs:
        shapes = [(1, heads, sum(LENGTHS), 32) for heads in (4, 2, 2)]
        states = [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]
        output, _ = varlen_attention(module, *states, None, sequences, **settings)
        output.sum().backward()
        return output, *(state.grad for state in states)

    sinks = {"s_aux": torch.zeros(4, device=DEVICE)}
    for name, dtype, settings, kernels in (
        ("bf16", torch.bfloat16, {}, (VARLEN,)),
        ("fp16", torch.float16, {}, (VARLEN,)),
        ("bf16, sliding window", torch.bfloat16, {"sliding_window": 8}, (VARLEN,)),
        ("fp32", torch.float32, {}, ()),
        ("bf16, sinks", torch.bfloat16, sinks, ()),
        ("bf16, soft cap", torch.bfloat16, {"softcap": 30.0}, ()),
    ):
        yield Route(f"attention, {name}", partial(walk, dtype, **settings), 0, kernels)


def ring_blocks() -> Iterator[Route]:
    """Yield the blocks of ring and gather attention, forward and backward."""
    for name, lengths in (("causal", (16, 16, 32)), ("whole", ())):

        def walk(lengths: tuple[int, ...] = lengths) -> Outputs:
            block = Block(slice(0, 64), slice(0, 64), DEVICE, lengths)
            states = States(*(torch.randn(heads, 64, 32, device=DEVICE, dtype=torch.bfloat16) for heads in (4, 2, 2)))
            attended = block.forward(states, 0.1)
            both = attended.merge(attended)
            return *attended, *both, *block.backward(torch.ones_like(states.query), states, attended, 0.1)

        yield Route(f"block of ring attention, {name}", walk, 0, FLASH)


# Weights and numbers on their way out.


def syncs() -> Iterator[Route]:
    """Yield both sides of a weight sync on the device: casts, digests and buckets, with an embedding."""
    shapes = {"embedding": (152_000, 4096), **{f"layer {i}": (4096, 12_288) for i in range(8)}}
    weights = [(name, torch.randn(shape, device=DEVICE)) for name, shape in shapes.items()]
    buckets = [*pack_buckets(weights, torch.bfloat16, True, DEVICE)]

    def pack() -> Outputs:
        return [flat for _, flat in pack_buckets(weights, torch.bfloat16, True, DEVICE)]

    def take_in() -> Outputs:
        for _, tensors in join_parts(buckets):
            as_digests([digest_sums(tensor) for tensor in tensors])
            yield from tensors

    ended = [entries for entries, _ in buckets if any(entry.is_last for entry in entries)]
    yield Route("buckets of a weight sync", pack, len(ended))
    yield Route("tensors of a weight sync", take_in, len([*join_parts(buckets)]))


def metrics() -> Iterator[Route]:
    """Yield the metrics of a step, which are added up on the device."""
    world = World(0, Mesh(1), DEVICE)
    values = torch.randn(9, device=DEVICE)
    means = {f"mean {i}": Mean(values.sum(), 9.0) for i in range(20)}
    others = {
        "deviation": Deviation(values.sum(), values.square().sum(), 9.0),
        "quantile": Quantile(values, values, 0.5),
    }

    def walk(kinds: dict[str, Any]) -> Outputs:
        exact = {name: metric.exact() + metric.exact() for name, metric in kinds.items()}
        world.combine(exact)
        return [metric.total for metric in exact.values() if isinstance(metric, Mean)] or [values]

    yield Route("twenty means", partial(walk, means), 1)
    yield Route("a deviation and a quantile", partial(walk, others), 2)
