"""What engines miss on this machine: vLLM, arguments that it does not have, and on a CPU kernels and the stages of a
pipeline."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.config.check.engine_arguments import KEY, QUANTIZATION
from rlhf_suite.config.check.formatting import did_you_mean
from rlhf_suite.config.check.lacking import Package, find_missing
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import LOOPS, PLANNED, SAMPLING
from rlhf_suite.config.plan.run_plan import ENGINE, JUDGE, roles
from rlhf_suite.launch.environment import cluster_to_join, device_kind
from rlhf_suite.python_source import module_file, parse_file

MODULE, CLASS = "vllm.engine.arg_utils", "EngineArgs"
CPU_QUANTIZATION = "fp8_per_channel"  # others need AMX, or operations that vLLM's build for CPUs does not have


def vllm_is_installed(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem of a run whose engines find no vLLM, which comes with an extra of the suite. Nothing is known
    where another machine will run the job."""
    starts = run.task in PLANNED and any(role.name in (ENGINE, JUDGE) for role in roles(run))
    if folder is None or cluster_to_join(run.launch) is not None or not (starts or run.task in LOOPS):
        return
    extra = "gpu" if device_kind(run.launch) == "cuda" else "cpu"
    if (missing := find_missing("task", Package("vLLM", "vllm", extra))) is not None:
        yield missing


def engine_arguments_exist(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each name in vllm.engine_args that vLLM's EngineArgs does not have. vLLM is read, not
    imported; where it is not installed nothing is known."""
    if run.task not in SAMPLING or not run.vllm.engine_args:
        return
    known = names_of_arguments()
    for name in run.vllm.engine_args if known else ():
        if name not in known:
            close = did_you_mean(name, known) or f"remove {name}"
            yield Problem(f"{KEY}.{name}", "the installed vLLM has no such argument", close)


def runs_on_cpus(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem of engines that vLLM's build for CPUs does not run: split by layers, or quantised otherwise than
    its kernels can. Nothing is known where another machine will run the job."""
    if folder is None or run.task not in SAMPLING or device_kind(run.launch) != "cpu":
        return
    if run.vllm.pipeline_parallel_size > 1:
        problem = "the CPU build of vLLM does not run the stages of a pipeline"
        fix = "write vllm.pipeline_parallel_size=1, or raise vllm.tensor_parallel_size"
        yield Problem("vllm.pipeline_parallel_size", problem, fix)
    if run.vllm.quantization not in (None, CPU_QUANTIZATION):
        problem = f"the CPU build of vLLM has no kernels of {run.vllm.quantization}"
        yield Problem(QUANTIZATION, problem, f"write {QUANTIZATION}={CPU_QUANTIZATION}, or null")


def names_of_arguments() -> list[str]:
    """Return the fields of EngineArgs; none without vLLM."""
    file = module_file(MODULE)
    classes = [node for node in parse_file(file).body if isinstance(node, ast.ClassDef)] if file is not None else []
    return [
        field.target.id
        for node in classes
        if node.name == CLASS
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
