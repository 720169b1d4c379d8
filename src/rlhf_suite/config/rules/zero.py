"""Rules about ZeRO stages, and about training without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.config.plan.run_plan import num_ranks, ranked_sections


def sums_apart(ds: DeepSpeedConfig) -> bool:
    """Return whether DeepSpeed 0.19 trains by the optimiser that it has for ZeRO-1 where bf16 gradients are added up in
    fp32 on the device."""
    return ds.zero_stage == 1 and (ds.param_dtype, ds.grad_accum_dtype) == ("bf16", "fp32") and not ds.adam_offload


@rule(tasks=TRAINED)
def reduction_has_hooks(run: Run) -> Iterator[Problem]:
    """Check that gradients are reduced by ZeRO's own optimiser where they are reduced during a backward pass, or by a
    compiled graph."""
    if not sums_apart(run.ds):
        return
    if run.ds.overlap_comm:
        problem = "ZeRO-1 with bf16 parameters and ds.grad_accum_dtype=fp32 reduces after the last backward pass"
        fix = "write ds.zero_stage=2, ds.grad_accum_dtype=bf16, or ds.overlap_comm=false"
        yield Problem("ds.overlap_comm", problem, fix)
    if run.ds.deepcompile:
        problem = "DeepSpeed does not compile ZeRO-1 with bf16 parameters and ds.grad_accum_dtype=fp32"
        yield Problem("ds.deepcompile", problem, "write ds.zero_stage=2, or ds.deepcompile=false")


@rule(tasks=TRAINED)
def torch_trains_alone(run: Run) -> Iterator[Problem]:
    for name, ranked in ranked_sections(run).items() if run.ds.zero_stage is None else ():
        if num_ranks(ranked) > 1:
            problem = f"ds.zero_stage=null trains on one rank, but {name} has {num_ranks(ranked)}"
            yield Problem("ds.zero_stage", problem, "write ds.zero_stage=2")
