"""The rows of the GPU kit: a trainer step of SFT, DPO or RL on one device, measured without anything around it.

The workers are those of the suite's runs, in one process and without DeepSpeed (ds.zero_stage=null). A step trains on
sequences of random tokens (DPO: one pair), all of which count but the first: bf16 weights with fp32 masters, packing,
gradient checkpointing, and a head that never holds all logits.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qwen3 import random_qwen3
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.sections import section_of
from rlhf_suite.config.plan.run_plan import ACTOR, Machine, ModelPlan, resolve
from rlhf_suite.data.batch import Example, Group, Item, collate
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.mesh import Mesh, Rank
from rlhf_suite.launch.address import LOOPBACK
from rlhf_suite.models.flash import find_package
from rlhf_suite.planner.devices import Model, flops_per_token, peak_flops
from rlhf_suite.rl.roles import PolicyRole, WorkerSettings
from rlhf_suite.tasks import dpo, sft
from rlhf_suite.train.strategy import TrainedModel
from rlhf_suite.train.supervised import Encoded, SupervisedWorker

WARM_UP = 2  # first steps, which are not counted
SMALLEST_ID = 16  # ids below it may be special tokens
DRY_LENGTH = 128  # a dry run has sequences shorter by this factor
Step = Callable[[int], dict[str, float]]


@dataclass(frozen=True)
class Row:
    """What is measured. `published`: the best tokens per second of a step and GiB of reserved memory that another
    trainer has published for an H100 (prime-rl); None where nothing is known."""

    name: str
    task: str
    shape: str
    length: int
    lora: int = 0
    sequences: int = 1  # of a step; of DPO pairs
    micro_batches: int = 1  # of a step
    published: tuple[float | None, float | None] = (None, None)


ROWS = (
    Row("rl-0.6b-16k", "rl", "qwen3-0.6b", 16_384, published=(16_447, 12.5)),
    Row("rl-0.6b-64k", "rl", "qwen3-0.6b", 65_536, published=(10_765, 19.6)),
    Row("rl-0.6b-16-of-1k", "rl", "qwen3-0.6b", 1_024, sequences=16),
    Row("rl-0.6b-8-of-2k-alone", "rl", "qwen3-0.6b", 2_048, sequences=8, micro_batches=8),
    Row("sft-0.6b-8k", "sft", "qwen3-0.6b", 8_192, published=(26_005, 31.7)),
    Row("sft-0.6b-16k", "sft", "qwen3-0.6b", 16_384, published=(25_486, 52.8)),
    Row("rl-4b-lora-16k", "rl", "qwen3-4b", 16_384, lora=16, published=(6_229, 23.3)),
    Row("dpo-0.6b-4k", "dpo", "qwen3-0.6b", 4_096),
)
FLAGS = {
    "ds.zero_stage": None,
    "ds.param_dtype": "bf16",
    "ds.grad_accum_dtype": "bf16",  # where a step has one micro-batch, nothing is added up
    "ds.packing_samples": True,
    "ds.lora.alpha": 32,
    "actor.gradient_checkpointing_enable": True,
    "train.max_epochs": 1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"ds.use_liger_kernel": False},
    "liger": {"ds.use_liger_kernel": True},
}
KERNELS = 12  # of the longest that the line of a row names


@dataclass(frozen=True)
class Bench:
    """Where rows are measured, and for how many steps. `flags` are set beside FLAGS."""

    device: str  # "cuda" or "cpu"
    folder: Path  # for models
    steps: int
    dry: bool
    flags: dict[str, Any]


def measure(row: Row, variant: str, bench: Bench) -> dict[str, Any]:
    """Return what a row comes to, or under `error` why it has no numbers."""
    shape, length = ("tiny", row.length // DRY_LENGTH) if bench.dry else (row.shape, row.length)
    settings = {"row": row.name, "variant": variant, "task": row.task, "shape": shape, "lora": row.lora}
    settings |= {"tokens_per_sequence": length, "sequences": row.sequences, "micro_batches": row.micro_batches}
    try:
        path = random_qwen3(bench.folder / shape, shape, bench.device)
        return settings | measured(row, path, length, replace(bench, flags=bench.flags | VARIANTS[variant]))
    except Exception as error:  # another row may still have numbers
        return settings | {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


def measured(row: Row, path: str, length: int, bench: Bench) -> dict[str, Any]:
    """Train WARM_UP steps and those that count; return rates, utilisation and memory."""
    flags = {**FLAGS, "ds.lora.rank": row.lora, "actor.model_name_or_path": path, **bench.flags}
    flags |= {"train.batch_size": row.sequences, "train.micro_batch_size": row.sequences // row.micro_batches}
    more = bench.device == "cuda"  # one step for the profile
    step, model = WORKLOADS[row.task](flags, length, WARM_UP + bench.steps + more, bench.device)
    for number in range(WARM_UP):
        step(number)
    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = now(bench.device)
    for number in range(WARM_UP, WARM_UP + bench.steps):
        step(number)
    seconds = (now(bench.device) - begin) / bench.steps
    tokens = length * row.sequences * (2 if row.task == "dpo" else 1)
    shape = matrices(model)
    flops = flops_per_token(shape, length, reference=shape if row.task == "dpo" else None)
    peak = peak_flops(torch.cuda.get_device_name()) if bench.device == "cuda" else None
    attention = (find_package() or "torch") if bench.device == "cuda" else None
    return {
        "tokens_per_s": round(tokens / seconds, 1),
        "mfu": None if peak is None else round(tokens / seconds * flops / peak, 4),
        "attention": attention,
        "peak_memory_gib": round(model.world.peak_memory_gb(), 2),
        "reserved_memory_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if more else None,
        "seconds_per_step": round(seconds, 4),
        "steps": bench.steps,
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "flops_per_token": flops,
        "published_tokens_per_s": row.published[0],
        "published_memory_gib": row.published[1],
        "profile": profile(lambda: step(WARM_UP + bench.steps)) if more else None,
    }


def profile(step: Callable[[], object]) -> dict[str, Any]:
    """Return the share of a step in which the device computes anything, and its longest kernels with their seconds and
    number."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        begin = now("cuda")
        step()
        seconds = now("cuda") - begin
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy, end = 0.0, -math.inf
    for event in sorted(kernels, key=lambda event: event.time_range.start):  # microseconds; streams may overlap
        busy += max(event.time_range.end - max(event.time_range.start, end), 0.0)
        end = max(event.time_range.end, end)
    totals: dict[str, list[float]] = {}
    for event in kernels:
        totals.setdefault(event.name[:100], []).append(event.time_range.elapsed_us() / 1e6)
    longest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:KERNELS]
    return {
        "seconds": round(seconds, 4),
        "busy_share": round(busy / 1e6 / seconds, 4),
        "launches": len(kernels),
        "kernels": [[name, round(sum(times), 4), len(times)] for name, times in longest],
    }


def now(device: str) -> float:
    """Return the time in seconds, once the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def matrices(model: TrainedModel) -> Model:
    """Return the matrices of a model for `flops_per_token`. The embedding of these shapes is the head too."""
    config = model.module.model.config
    assert config.tie_word_embeddings, "else the embedding would count, which is only looked up"
    sizes = [(p.numel(), p.requires_grad) for p in model.module.parameters() if p.ndim == 2]
    trained = sum(size for size, is_trained in sizes if is_trained)
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return Model(trained, sum(size for size, _ in sizes) - trained, heads)


def random_examples(count: int, length: int) -> list[Example]:
    """Return sequences of random tokens, all of which are trained on but the first."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(SMALLEST_ID, 256, (count, length), generator=generator)
    return [Example(row, [0] + [1] * (length - 1)) for row in ids.tolist()]


def rank(device: str) -> Rank:
    """Return the only rank of a model. It meets nobody."""
    return Rank(0, Mesh(1), LOOPBACK, 0, device)


def supervised(run: Run, make_task: Any, items: Sequence[Item], device: str) -> tuple[Step, TrainedModel]:
    worker = SupervisedWorker(rank(device), run, resolve(run, Machine(device, 1)), make_task, Encoded(items, {}))
    return worker.train_step, worker.model


def of_sft(flags: dict[str, Any], length: int, steps: int, device: str) -> tuple[Step, TrainedModel]:
    run = section_of(Run, "sft", {**flags, "actor.pretrain_mode_enable": True, "data.max_len": length})
    return supervised(run, sft.make_task, random_examples(steps * run.train.batch_size, length), device)


def of_dpo(flags: dict[str, Any], length: int, steps: int, device: str) -> tuple[Step, TrainedModel]:
    run = section_of(Run, "dpo", {**flags, "data.max_len": length})
    answers = random_examples(2 * steps, length)
    pairs = [Group((answers[i], answers[i + 1])) for i in range(0, 2 * steps, 2)]
    return supervised(run, dpo.make_task, pairs, device)


def of_rl(flags: dict[str, Any], length: int, steps: int, device: str) -> tuple[Step, TrainedModel]:
    """Return an update of the policy on a synthetic rollout, whose log-probs are those of a uniform distribution."""
    run = section_of(Run, "ppo", {**flags, "data.max_len": length, "algo.kl.init_coef": 0.0})
    path = run.actor.model_name_or_path
    settings = WorkerSettings(run.ds, run.train, run.rollout, run.data, path)
    policy = PolicyRole(rank(device), ModelPlan(ACTOR, path), settings, run.actor, run.algo.kl, steps)
    uniform = -torch.tensor(float(policy.model.module.model.config.vocab_size)).log()
    rows = run.train.batch_size
    examples = random_examples(steps * rows, length)

    def step(number: int) -> dict[str, float]:
        batch = collate(examples[number * rows : (number + 1) * rows], Experience)
        even = torch.arange(length * rows) % 2 * 2.0 - 1.0
        old = torch.full((length * rows,), float(uniform)) * batch.mask
        rollout = Experience(
            batch.ids,
            batch.lengths,
            batch.mask,
            index=torch.arange(rows),
            engine_log_probs=old,
            old_log_probs=old,
            advantages=even * batch.mask,
        )
        return policy.update([rollout], number, kl_coef=0.0, entropy_coef=None)

    return step, policy.model


WORKLOADS = {"sft": of_sft, "dpo": of_dpo, "rl": of_rl}
