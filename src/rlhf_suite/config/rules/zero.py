"""Rules about ZeRO stages, and about training without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.check.formatting import spell
from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL, TRAINED
from rlhf_suite.config.plan.run_plan import model_sections, num_ranks, ranked_sections


@rule(tasks=RL)
def optimiser_states_can_move(run: Run) -> Iterator[Problem]:
    """DeepSpeed 0.19 has no such function for the optimisers of ZeRO 0 and 1."""
    if run.ds.enable_sleep and run.ds.zero_stage not in (2, 3):
        problem = f"DeepSpeed moves optimiser states with ds.zero_stage=2 or 3, but it is {spell(run.ds.zero_stage)}"
        yield Problem("ds.enable_sleep", problem, "write ds.zero_stage=2, or ds.enable_sleep=false")
    elif run.ds.enable_sleep and run.ds.adam_offload:
        problem = "with ds.adam_offload=true the optimiser state is always in host memory"
        yield Problem("ds.enable_sleep", problem, "write ds.enable_sleep=false, or ds.adam_offload=false")


@rule(tasks=TRAINED)
def zero_stage_fits(run: Run) -> Iterator[Problem]:
    stage = run.ds.zero_stage
    for name, is_on, least in (("adam_offload", run.ds.adam_offload, 1), ("zpg", run.ds.zpg > 1, 3)):
        if is_on and (stage or 0) < least:
            problem = f"needs ds.zero_stage={least} or more, but it is {spell(stage)}"
            yield Problem(f"ds.{name}", problem, f"write ds.zero_stage={least}")
    yield from reduction_overlaps(run.ds)
    if stage == 0 and run.ds.param_dtype == "bf16":
        problem = "keeps no fp32 master weights, and a bf16 weight does not move by a small update"
        yield Problem("ds.zero_stage", f"0 with bf16 {problem}", "write ds.zero_stage=1, or ds.param_dtype=fp32")
    if run.ds.grad_accum_dtype == "bf16" and run.ds.param_dtype == "fp32":
        problem = "bf16 would round the gradients of fp32 parameters"
        yield Problem("ds.grad_accum_dtype", problem, "write ds.grad_accum_dtype=fp32, or ds.param_dtype=bf16")


def sums_apart(ds: DeepSpeedConfig) -> bool:
    """Return whether DeepSpeed 0.19 trains by the optimiser that it has for ZeRO-1 where bf16 gradients are added up in
    fp32 on the device."""
    return ds.zero_stage == 1 and (ds.param_dtype, ds.grad_accum_dtype) == ("bf16", "fp32") and not ds.adam_offload


def reduction_overlaps(ds: DeepSpeedConfig) -> Iterator[Problem]:
    """Yield why gradients cannot be reduced during a backward pass, which takes the hooks of ZeRO's own optimiser."""
    if not ds.overlap_comm:
        return
    key, off = "ds.overlap_comm", "ds.overlap_comm=false"
    if not ds.zero_stage:
        alone = ds.zero_stage is None
        problem = "one rank has nothing to reduce" if alone else "gradients are reduced after the backward pass"
        yield Problem(key, f"with ds.zero_stage={spell(ds.zero_stage)} {problem}", f"write ds.zero_stage=2, or {off}")
    elif sums_apart(ds):
        problem = "ZeRO-1 with bf16 parameters and ds.grad_accum_dtype=fp32 reduces after the last backward pass"
        yield Problem(key, problem, f"write ds.zero_stage=2, ds.grad_accum_dtype=bf16, or {off}")


@rule(tasks=TRAINED)
def reduction_compiles(run: Run) -> Iterator[Problem]:
    """DeepCompile takes the hooks of ZeRO away, so all of a model must be in its graphs, and nothing else may move the
    gradients."""
    key = "ds.deepcompile"
    if not run.ds.deepcompile:
        return
    if run.launch.device == "cpu":
        yield Problem(key, "DeepSpeed compiles for GPUs alone (launch.device=cpu)", f"write {key}=false")
    if not run.ds.zero_stage or sums_apart(run.ds):
        problem = "DeepSpeed does not compile ZeRO-1 with bf16 parameters and ds.grad_accum_dtype=fp32"
        if not run.ds.zero_stage:
            problem = f"DeepSpeed compiles ZeRO-1 to 3, but ds.zero_stage is {spell(run.ds.zero_stage)}"
        yield Problem(key, problem, f"write ds.zero_stage=2, or {key}=false")
    for remedy, why in beside_compiled(run):
        yield Problem(key, f"{why} ({remedy.partition('=')[0]})", f"write {remedy}, or {key}=false")


def beside_compiled(run: Run) -> Iterator[tuple[str, str]]:
    """Yield flags with the values that DeepCompile needs where they have others, and why."""
    ds = run.ds
    for remedy, differs, why in (
        ("ds.packing_samples=false", ds.packing_samples, "packed rows have ever new shapes, each compiled anew"),
        ("ds.ring_attn_size=1", ds.ring_attn_size > 1, "ranks split the tokens of packed rows alone"),
        ("ds.overlap_comm=false", ds.overlap_comm, "the compiled graph reduces the gradients itself"),
        ("ds.adam_offload=false", ds.adam_offload, "its gradients stay on the GPU"),
        ("ds.enable_sleep=false", getattr(ds, "enable_sleep", False), "its gradients stay on the GPU"),
        ("ds.lora.rank=0", ds.lora.rank > 0, "frozen weights beside adapters have not been tried"),
        ("ds.tensor_parallel_size=1", ds.tensor_parallel_size > 1, "DeepSpeed does not compile both"),
        ("ds.zpg=1", ds.zpg > 1, "the compiled graph gathers from all ranks"),
    ):
        if differs:
            yield remedy, why
    for name, section in model_sections(run).items():
        if isinstance(section, TrainedModelConfig) and section.optim == "muon":
            yield f"{name}.optim=adam", "muon has not been tried with it"


@rule(tasks=TRAINED)
def torch_trains_alone(run: Run) -> Iterator[Problem]:
    if run.ds.zero_stage is not None:
        return
    for name, ranked in ranked_sections(run).items():
        if num_ranks(ranked) > 1:
            problem = f"ds.zero_stage=null trains on one rank, but {name} has {num_ranks(ranked)}"
            yield Problem("ds.zero_stage", problem, "write ds.zero_stage=2")
    for name, section in model_sections(run).items():
        if isinstance(section, TrainedModelConfig) and section.optim == "muon":
            problem = "Muon is that of DeepSpeed, which ds.zero_stage=null leaves out"
            yield Problem(f"{name}.optim", problem, f"write ds.zero_stage=2, or {name}.optim=adam")
