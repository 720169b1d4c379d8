"""The changes to a run that does not fit, declared as a list: first those that keep its numbers and its devices.

Each change has options, the mildest first. An option says which flags get which values in a run, that may have other
changes already; `search.py` finds out which changes it takes together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial, reduce
from typing import Any

from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.rollout import most_sequences
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL
from rlhf_suite.config.plan.micro_batches import trained_micro_batches

Words = tuple[str, ...]  # of a command line: flag=value
Values = Mapping[str, Any]  # of flags
Option = Callable[[Run], Values]
MAX_RANKS = 64  # of a model, on one node that is as large as it needs
MAX_SPLIT = 8  # GPUs of an engine: those of one node, between which NVLink is
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # of a GPU, for an engine
SEQUENCES = (128, 64, 32, 16)  # that an engine runs at once
CACHES = (256, 1024, 4096, 16_384)  # MiB of an engine on a CPU


class Kind(IntEnum):
    """What a change gives up. Changes of a kind are searched only if no others help."""

    SAME = 0  # nothing but speed: the same numbers on the same devices
    DEVICES = 1  # it takes more devices
    TRAINING = 2  # it trains something else


@dataclass(frozen=True)
class Change:
    """One change and its options. With `is_ladder` each option needs less memory than the one before it."""

    options: tuple[Option, ...]
    is_ladder: bool = False
    kind: Kind = Kind.SAME


def set_flags(values: Values) -> Option:
    """Return an option that sets the same values in every run."""
    return lambda run: values


def changes(run: Run, on_gpu: bool) -> list[Change]:
    """Return the changes to a run, in the order in which they are made to it, the milder ones first."""
    listed = [*disk_changes(run), *batch_changes(run)]
    models = [name for name in ("critic", "actor") if name == "actor" or run.task in RL]
    for name in models:
        recomputes = getattr(run, name).gradient_checkpointing_enable
        if recomputes is False:  # where it is null the plan has tried it
            listed.append(Change((set_flags({f"{name}.gradient_checkpointing_enable": True}),)))
    if run.ds.zero_stage is not None and run.actor.num_gpus_per_node == 1:
        listed.append(Change((set_flags({"ds.zero_stage": None}),)))  # no second copy of fp32 weights, and no buffers
    listed += [*gpu_changes(run)] if on_gpu else []
    if run.ds.zero_stage != 3 and run.actor.num_gpus_per_node > 1:
        listed.append(Change((set_flags({"ds.zero_stage": 3}),)))
    listed += [*rank_changes(run), *engine_changes(run, on_gpu)]
    if not run.ds.lora.rank:
        adapters = set_flags({"ds.lora.rank": 16})
        packed = set_flags({"ds.lora.rank": 16, "ds.load_in_4bit": True})
        listed.append(Change((adapters, packed), is_ladder=True, kind=Kind.TRAINING))
    return listed


def disk_changes(run: Run) -> Iterator[Change]:
    """Yield fewer and smaller checkpoints."""
    if run.ckpt.save_steps > 0:
        fewer = [set_flags({"ckpt.max_num": 1})] if run.ckpt.max_num > 1 else []
        yield Change((*fewer, set_flags({"ckpt.disable_ds": True}), set_flags({"ckpt.save_steps": -1})))


def batch_changes(run: Run) -> Iterator[Change]:
    """Yield smaller micro-batches, which change memory and speed, but not the gradient of a step."""
    limit = trained_micro_batches(run.train)
    options = []
    if limit.tokens is not None:
        budget = limit.tokens // 2
        while budget * run.ds.ring_attn_size >= run.data.max_len:
            options.append(set_flags({"train.max_tokens_per_gpu": budget}))
            budget //= 2
    rows = (limit.rows or 0) // 2
    while rows >= 1:
        if run.train.batch_size % rows == 0:
            options.append(set_flags({"train.micro_batch_size": rows}))
        rows //= 2
    if options:
        yield Change(tuple(options), is_ladder=True)


def gpu_changes(run: Run) -> Iterator[Change]:
    """Yield what may be in host memory instead of in that of a GPU."""
    idle = [name for name in ("ref", "teacher") if getattr(getattr(run, name, None), "offload", True) is False]
    if idle:
        yield Change((lambda run: {f"{name}.offload": True for name in idle},))
    if not run.ds.adam_offload:
        yield Change((offload_adam,))


def offload_adam(run: Run) -> Values:
    """Keep optimiser states in host memory always, which ends their moves there and back."""
    awake = {"ds.enable_sleep": False} if getattr(run.ds, "enable_sleep", False) else {}
    return {"ds.adam_offload": True} | awake


def rank_changes(run: Run) -> Iterator[Change]:
    """Yield more ranks, over which ZeRO-3 divides weights, gradients and optimiser states."""
    names = [name for name in ("actor", "critic", "ref") if hasattr(getattr(run, name, None), "num_gpus_per_node")]
    options, ranks = list[Option](), run.actor.num_gpus_per_node * 2
    while ranks <= min(MAX_RANKS, run.train.batch_size):
        options.append(partial(take_ranks, names, ranks))
        ranks *= 2
    if options:
        yield Change(tuple(options), is_ladder=True, kind=Kind.DEVICES)


def take_ranks(names: list[str], ranks: int, run: Run) -> Values:
    """Give each model so many ranks, and with shared GPUs an engine to each."""
    more: dict[str, Any] = {f"{name}.num_gpus_per_node": ranks for name in names}
    if run.task in RL and run.train.colocate_all:
        more["vllm.num_engines"] = ranks * (run.actor.num_nodes or 1) // run.vllm.devices
    return more | {"ds.zero_stage": 3}


def engine_changes(run: Run, on_gpu: bool) -> Iterator[Change]:
    """Yield changes to the engines of a run."""
    if run.task not in RL or run.replays:
        return
    if not on_gpu:
        larger = tuple(set_flags({"vllm.kv_cache_mb": size}) for size in CACHES if size > (run.vllm.kv_cache_mb or 64))
        yield Change(larger)
        return
    if run.vllm.kv_cache_mb is not None:
        yield Change((set_flags({"vllm.kv_cache_mb": None}),))
    if not (run.vllm.enable_sleep and (run.ds.enable_sleep or run.ds.adam_offload)):
        yield Change((sleep, sleep_whole))
    yield Change(tuple(partial(split, size) for size in (2, 4, MAX_SPLIT)))
    yield Change(tuple(set_flags({"vllm.gpu_memory_utilization": share}) for share in SHARES))
    most = most_sequences(run.vllm, "cuda")
    fewer = tuple(set_flags({"vllm.max_num_seqs": count}) for count in SEQUENCES if count < most)
    if fewer:
        yield Change(fewer, is_ladder=True)


def sleep(run: Run) -> Values:
    """Share the GPUs, and let the engines leave them while the policy trains."""
    return {"train.colocate_all": True, "vllm.enable_sleep": True}


def sleep_whole(run: Run) -> Values:
    """Let engines and optimiser states leave the GPUs in turn."""
    return {**sleep(run), "ds.enable_sleep": True}


def split(size: int, run: Run) -> Values:
    """Split each engine over `size` GPUs, of as many GPUs in all as before."""
    gpus = run.vllm.num_engines * run.vllm.devices
    engines = max(1, gpus // (size * run.vllm.pipeline_parallel_size))
    return {"vllm.tensor_parallel_size": size, "vllm.num_engines": engines}


def with_values(run: Run, values: Values) -> Run:
    """Return a copy of the run in which flags have these values."""
    changed = copy.deepcopy(run)
    for key, value in values.items():
        *sections, name = key.split(".")
        setattr(reduce(getattr, sections, changed), name, value)
    return changed


def words_of(values: Values) -> Words:
    """Return flags and their values as words of a command line."""
    return tuple(f"{name}={spell(value)}" for name, value in values.items())
