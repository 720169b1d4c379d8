"""What the plan decides about the memory of a run when it starts, and what it says of it.

It is an estimate, so it refuses nothing. `planner/` makes the plan; here is which machine or GPUs it is made for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.config.check.sources import BUILTIN
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.config.plan.run_plan import model_sections
from rlhf_suite.doctor.gpus import Driver, read_driver
from rlhf_suite.errors import UserError
from rlhf_suite.launch.environment import cluster_to_join, device_kind
from rlhf_suite.launch.slurm import allocation, is_first_node
from rlhf_suite.machine_limits import machine_memory

if TYPE_CHECKING:
    from rlhf_suite.planner.needs import Target

SMALL_BYTES = 256 << 20  # of weights, below which no plan is made at the start of a run on CPUs


def fit_to_memory(run: Run) -> tuple[Run, list[str]]:
    """Return the run with what the plan decides for the memory of this machine or of its GPUs, and what to say of it at
    its start. The planner imports torch, so this is asked where a run has set its environment and needs torch itself.
    """
    if run.task not in TRAINED:
        return run, []
    if device_kind(run.launch) == "cpu":
        elsewhere = cluster_to_join(run.launch) is not None or allocation() is not None
        return (run, []) if elsewhere or are_small(run) else fit_to_machine(run, machine_memory())
    driver = read_driver() if is_first_node() and cluster_to_join(run.launch) is None else None
    return fit_to_driver(run, driver if isinstance(driver, Driver) else None)


def are_small(run: Run) -> bool:
    """Return whether the weights of all models of a run are so few that any machine has the memory. Only the sizes of
    files are read. A model that is not a folder here counts as large."""
    paths = [getattr(section, "model_name_or_path", None) for section in model_sections(run).values()]
    sizes = [weight_bytes(path) for path in paths if path is not None]
    return all(size is not None for size in sizes) and sum(size or 0 for size in sizes) < SMALL_BYTES


def weight_bytes(path: str) -> int | None:
    """Return the bytes of the files of weights of a model; None if it is not a folder here."""
    if path.startswith(BUILTIN):
        return 0
    files = [file for file in Path(path).glob("*") if file.suffix in (".safetensors", ".bin")]
    return sum(file.stat().st_size for file in files) if Path(path).is_dir() else None


def fit_to_machine(run: Run, memory: int) -> tuple[Run, list[str]]:
    """Return the run with what the plan decides for a machine with so many bytes of memory, and what to say of it."""
    from rlhf_suite.planner.needs import Target

    return decide_by_plan(run, Target(None, memory, None)) or (run, [])


def fit_to_driver(run: Run, driver: Driver | None) -> tuple[Run, list[str]]:
    """Return the run with what the plan decides for the GPUs of a driver, and what to say of it; None, or a type of GPU
    without numbers: the plan does not know them."""
    from rlhf_suite.planner.checkpointing import models_to_decide, with_decisions
    from rlhf_suite.planner.devices import find_kind
    from rlhf_suite.planner.estimate import UTILISATION
    from rlhf_suite.planner.needs import Target

    gpus = driver.gpus if driver is not None else ()
    device = next(filter(None, (find_kind(gpu.name) for gpu in gpus)), None)
    if device is not None:
        target = Target(device, min(gpu.total for gpu in gpus), device.flops * UTILISATION)
        if (decided := decide_by_plan(run, target)) is not None:
            return decided
    names = models_to_decide(run)
    remark = "The plan does not know these GPUs or this model, so activations are recomputed: write "
    remark += " and ".join(f"{name}.gradient_checkpointing_enable=false" for name in names) + " to keep them."
    return with_decisions(run, dict.fromkeys(names, True)), [remark] if names else []


def decide_by_plan(run: Run, target: Target) -> tuple[Run, list[str]] | None:
    """Return the run with what its plan for these devices decides, and what to say of it; None if the planner cannot
    read a model of the run: loading it says what is wrong."""
    from rlhf_suite.planner.budget import with_budget
    from rlhf_suite.planner.checkpointing import with_decisions
    from rlhf_suite.planner.estimate import estimate
    from rlhf_suite.planner.table import say_deadline, say_decisions

    try:
        planned = estimate(run, target)
    except UserError:
        return None
    remarks = [*say_decisions(planned), *map(say_what_does_not_fit, planned.problems)]
    remarks += say_deadline(planned) if planned.is_late else ()
    return with_budget(with_decisions(run, planned.checkpointing), planned.budget), remarks


def say_what_does_not_fit(problem: str) -> str:
    """Return what to say of a run that the plan expects not to fit."""
    return f"By the plan this run does not fit: {problem}. plan=true shows what takes the memory and what would fit."
