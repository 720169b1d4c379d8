"""Rules about ZeRO stages, and about training without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.formatting import spelled
from rlhf_suite.config.models import TrainedModelConfig
from rlhf_suite.config.plan import Ranked, model_sections, num_ranks
from rlhf_suite.config.problems import Problem, rule
from rlhf_suite.config.runs import AnyTrainedRun, PPORun


@rule
def optimiser_states_can_move(run: PPORun) -> Iterator[Problem]:
    """DeepSpeed 0.19 has no such function for the optimisers of ZeRO 0 and 1, and under ZeRO-3 it moves the states of
    its own FusedAdam alone, while the optimiser here is torch's."""
    if run.ds.enable_sleep and run.ds.zero_stage != 2:
        what = f"DeepSpeed moves optimiser states only with ds.zero_stage=2, but it is {spelled(run.ds.zero_stage)}"
        yield Problem("ds.enable_sleep", what, "write ds.zero_stage=2, or ds.enable_sleep=false")
    elif run.ds.enable_sleep and run.ds.adam_offload:
        what = "with ds.adam_offload=true the optimiser state is always in host memory"
        yield Problem("ds.enable_sleep", what, "write ds.enable_sleep=false, or ds.adam_offload=false")


@rule
def zero_stage_fits(run: AnyTrainedRun) -> Iterator[Problem]:
    stage = run.ds.zero_stage
    for name, is_on, least in (
        ("adam_offload", run.ds.adam_offload, 1),
        ("zpg", run.ds.zpg > 1, 3),
    ):
        if is_on and (stage or 0) < least:
            what = f"needs ds.zero_stage={least} or more, but it is {spelled(stage)}"
            yield Problem(f"ds.{name}", what, f"write ds.zero_stage={least}")
    yield from reduction_overlaps(run.ds)
    if stage == 0 and run.ds.param_dtype == "bf16":
        what = "keeps no fp32 master weights, and a bf16 weight does not move by a small update"
        yield Problem("ds.zero_stage", f"0 with bf16 {what}", "write ds.zero_stage=1, or ds.param_dtype=fp32")
    if run.ds.grad_accum_dtype == "bf16" and run.ds.param_dtype == "fp32":
        what = "bf16 would round the gradients of fp32 parameters"
        yield Problem("ds.grad_accum_dtype", what, "write ds.grad_accum_dtype=fp32, or ds.param_dtype=bf16")


def reduction_overlaps(ds: DeepSpeedConfig) -> Iterator[Problem]:
    """Yield why the gradients cannot be reduced during a backward pass: that takes the hooks of ZeRO's own optimiser.
    DeepSpeed 0.19 has another one for ZeRO-1 where bf16 gradients are added up in fp32 on the device."""
    if not ds.overlap_comm:
        return
    key, off = "ds.overlap_comm", "ds.overlap_comm=false"
    if not ds.zero_stage:
        alone = ds.zero_stage is None
        what = "one rank has nothing to reduce" if alone else "gradients are reduced after the backward pass"
        yield Problem(key, f"with ds.zero_stage={spelled(ds.zero_stage)} {what}", f"write ds.zero_stage=2, or {off}")
    elif ds.zero_stage == 1 and ds.param_dtype == "bf16" and ds.grad_accum_dtype == "fp32" and not ds.adam_offload:
        what = "ZeRO-1 with bf16 parameters and ds.grad_accum_dtype=fp32 reduces after the last backward pass"
        yield Problem(key, what, f"write ds.zero_stage=2, ds.grad_accum_dtype=bf16, or {off}")


@rule
def torch_trains_alone(run: AnyTrainedRun) -> Iterator[Problem]:
    if run.ds.zero_stage is not None:
        return
    for name, section in model_sections(run).items():
        if isinstance(section, Ranked) and num_ranks(section) > 1:
            what = f"ds.zero_stage=null trains on one rank, but {name} has {num_ranks(section)}"
            yield Problem("ds.zero_stage", what, "write ds.zero_stage=2")
        if isinstance(section, TrainedModelConfig) and section.optim == "muon":
            what = "Muon is that of DeepSpeed, which ds.zero_stage=null leaves out"
            yield Problem(f"{name}.optim", what, f"write ds.zero_stage=2, or {name}.optim=adam")
