"""What to change in a run that does not fit: the mildest change that helps, first those that keep its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from rlhf_suite.config.micro_batches import trained_micro_batches
from rlhf_suite.config.runs import AnyTrainedRun, PPORun
from rlhf_suite.planner.estimate import Estimate

Words = tuple[str, ...]  # of a command line: flag=value
Replan = Callable[[Words], Estimate | None]  # None: these words do not make a run that can be planned
PROPOSALS = 3
MAX_RANKS = 64  # of a model, on one node that is as large as it needs


def remedies(run: AnyTrainedRun) -> Iterator[Words]:
    """Yield changes, the mildest first. Those of the same flag follow each other, the strongest last."""
    yield from disk_remedies(run)
    yield from engine_remedies(run)
    yield from batch_remedies(run)
    if isinstance(run, PPORun):
        yield from model_remedies("critic", run)
    yield from model_remedies("actor", run)
    if any(model in vars(run) for model in ("ref", "teacher")):
        for name in ("ref", "teacher"):
            if name in vars(run):
                yield (f"{name}.offload=true",)
    if run.ds.zero_stage in (0, 1, 2) and run.actor.num_gpus_per_node > 1:
        yield ("ds.zero_stage=3",)
    yield ("ds.adam_offload=true",)
    yield from rank_remedies(run)
    yield ("ds.lora.rank=16",)
    yield "ds.lora.rank=16", "ds.load_in_4bit=true"


def disk_remedies(run: AnyTrainedRun) -> Iterator[Words]:
    """Yield fewer and smaller checkpoints."""
    if run.ckpt.save_steps > 0:
        if run.ckpt.max_num > 1:
            yield ("ckpt.max_num=1",)
        yield ("ckpt.disable_ds=true",)
        yield ("ckpt.save_steps=-1",)


def engine_remedies(run: AnyTrainedRun) -> Iterator[Words]:
    """Yield changes to the engines of a run."""
    if not isinstance(run, PPORun):
        return
    yield "train.colocate_all=true", "vllm.enable_sleep=true", "ds.enable_sleep=true"
    for share in (0.6, 0.5, 0.4, 0.3, 0.2):
        if share < (run.vllm.gpu_memory_utilization or 0.9):
            yield (f"vllm.gpu_memory_utilization={share}",)
    for mib in (256, 1024, 4096, 16_384):
        if mib > (run.vllm.kv_cache_mb or 64):
            yield (f"vllm.kv_cache_mb={mib}",)


def batch_remedies(run: AnyTrainedRun) -> Iterator[Words]:
    """Yield smaller micro-batches, which change memory and speed, but not the gradient of a step."""
    limit = trained_micro_batches(run.train)
    if limit.tokens is not None:
        budget = limit.tokens // 2
        while budget * run.ds.ring_attn_size >= run.data.max_len:
            yield (f"train.max_tokens_per_gpu={budget}",)
            budget //= 2
    rows = (limit.rows or 0) // 2
    while rows >= 1:
        if run.train.batch_size % rows == 0:
            yield (f"train.micro_batch_size={rows}",)
        rows //= 2


def model_remedies(name: str, run: AnyTrainedRun) -> Iterator[Words]:
    """Yield changes to one trained model."""
    if not getattr(run, name).gradient_checkpointing_enable:
        yield (f"{name}.gradient_checkpointing_enable=true",)


def rank_remedies(run: AnyTrainedRun) -> Iterator[Words]:
    """Yield more ranks, over which ZeRO-3 divides weights, gradients and optimiser states."""
    names = [name for name in ("actor", "critic", "ref") if hasattr(getattr(run, name, None), "num_gpus_per_node")]
    ranks = run.actor.num_gpus_per_node * 2
    while ranks <= min(MAX_RANKS, run.train.batch_size):
        more = [f"{name}.num_gpus_per_node={ranks}" for name in names]
        engines = [f"vllm.num_engines={ranks}"] if isinstance(run, PPORun) and run.train.colocate_all else []
        yield *more, *engines, "ds.zero_stage=3"
        ranks *= 2


def proposals(run: AnyTrainedRun, replan: Replan) -> list[tuple[Words, Estimate]]:
    """Return the mildest changes with which the run fits, each with its estimate: up to three that suffice alone, or
    else as many as it takes together. Empty if nothing known helps."""
    sufficient = []
    usable = []
    for words in remedies(run):
        planned = replan(words)
        if planned is None:
            continue
        if planned.fits:
            sufficient.append((words, planned))
        if len(sufficient) == PROPOSALS:
            return sufficient
        usable.append(words)
    if sufficient:
        return sufficient
    for together in accumulate(usable, merge):
        planned = replan(together)
        if planned is not None and planned.fits:
            return [(drop_needless(together, replan), planned)]
    return []


def merge(first: Words, second: Words) -> Words:
    """Return both changes; of a flag that both name, the second value holds."""
    values = dict(word.split("=", 1) for word in (*first, *second))
    return tuple(f"{name}={value}" for name, value in values.items())


def drop_needless(words: Words, replan: Replan) -> Words:
    """Return the words without those that the run fits without, tried from the first on."""
    for word in words:
        fewer = tuple(other for other in words if other != word)
        planned = replan(fewer)
        if planned is not None and planned.fits:
            return drop_needless(fewer, replan)
    return words
