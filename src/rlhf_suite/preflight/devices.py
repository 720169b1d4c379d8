"""The devices that a run wants, and those that it gets: what is refused, what stays idle, what is assumed.

Where a run will be is not always here: a job of Slurm is elsewhere, and so is the cluster of `launch.ray_address`. With
`launch.device=cuda` on a machine without a GPU, `explain=true` shows the plan of a machine that has as many as needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from omegaconf import OmegaConf

from rlhf_suite.config.check.formatting import number_of
from rlhf_suite.config.check.problems import Problem, distinct
from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.config.declarations.task_groups import LOOPS, PLANNED, RL
from rlhf_suite.config.plan.loop_stages import plan_stages
from rlhf_suite.config.plan.object_store import object_store_mb
from rlhf_suite.config.plan.placement import Placement, Role
from rlhf_suite.config.plan.run_plan import ENGINE, JUDGE, REWARD, Machine, WorkerPlan, is_on_ray, resolve
from rlhf_suite.launch.environment import cluster_to_join, device_kind, gpu_count
from rlhf_suite.launch.placement import CPUS_PER_DEVICE
from rlhf_suite.launch.ray_cluster import machine
from rlhf_suite.preflight.inspections.routing import route_bytes
from rlhf_suite.preflight.jobs import Preflight

ELSEWHERE = "start it where there are more (hydra/launcher=slurm, or launch.ray_address)"
SLURM = "the job of Slurm"


@dataclass(frozen=True)
class Devices:
    """What is known of the devices of a run: `place` has `num_gpus` of them (None: nobody knows), and `machine` is what
    the plan goes by."""

    machine: Machine
    num_gpus: int | None
    place: str = "this machine"


def devices_of(run: Run, checked: Preflight) -> Devices:
    """Return the devices that a run of a command line gets: of its job of Slurm, or those of this machine."""
    here = machine(run.launch)
    if checked.is_job:
        return Devices(here, here.num_gpus if cluster_to_join(run.launch) is None else None)
    launcher = checked.hydra.runtime.choices["hydra/launcher"] if checked.is_sweep or checked.is_submitted else None
    if launcher == "slurm":
        nodes = OmegaConf.select(checked.hydra, "launcher.nodes") or 1
        per_node = OmegaConf.select(checked.hydra, "launcher.gpus_per_node")
        total = None if per_node is None else nodes * per_node
        device = "cuda" if total and run.launch.device == "auto" else here.device
        return Devices(Machine(device, total if nodes == 1 else None), total, SLURM)
    limit = OmegaConf.select(checked.hydra, "launcher.gpus_per_job") if launcher == "local" else None
    if limit is not None and here.num_gpus:
        return Devices(Machine(here.device, limit), limit, "a job of hydra.launcher.gpus_per_job")
    return Devices(here, here.num_gpus)


def placements(run: Run, devices: Devices) -> Iterator[Placement]:
    """Yield where the models and engines of a run are, or those of each stage of a loop."""
    for one in [stage.run for stage in plan_stages(run)] if run.task in LOOPS else [run]:
        if one.task in PLANNED:
            yield resolve(one, devices.machine).placement


def device_problems(checked: Preflight) -> list[Problem]:
    """Return what the devices lack that the runs of a command line would ask for once they have started."""
    return distinct(problem for run in checked.runs for problem in list_lacking(run, devices_of(run, checked)))


def list_lacking(run: Run, devices: Devices) -> Iterator[Problem]:
    """Yield what a run lacks of these devices."""
    if no_gpu_here(run, devices):
        fix = "use launch.device=cpu, or see nvidia-smi; explain=true and plan=true need no GPU"
        yield Problem("launch.device", "cuda, but no GPU is visible here", fix)
        return
    for placement in placements(run, devices):
        if placement.device == "cpu":
            yield from too_few_cpus(run, placement)
        elif devices.num_gpus is not None and placement.num_devices > devices.num_gpus:
            yield too_few_gpus(run, placement, devices)


def no_gpu_here(run: Run, devices: Devices) -> bool:
    """Return whether a run asks for GPUs of this machine, which has none."""
    is_here = devices.place == Devices.place and cluster_to_join(run.launch) is None
    return is_here and devices.machine.device == "cuda" and not devices.num_gpus and not gpu_count()


def too_few_gpus(run: Run, placement: Placement, devices: Devices) -> Problem:
    """Return the problem of a placement with more GPUs than there are."""
    roles = [role for pool in placement.pools for role in pool.roles]
    largest = max(roles, key=lambda role: role.num_devices)
    has = "is visible" if devices.num_gpus == 1 else "are visible"
    problem = f"the run takes {number_of(placement.num_devices, 'GPU')} ({'; '.join(placement.lines())}), and "
    problem += f"{devices.num_gpus} {has} to {devices.place}"
    lower = ", ".join(flag_of(role) for role in roles if role.num_devices > 1)
    sizes = {role.num_devices for role in roles}
    shares = run.task in RL and len(placement.pools) > 1 and len(sizes) == 1
    shares = shares and max(sizes) <= (devices.num_gpus or 0)
    fixes = [f"lower {lower}"] if lower else []
    fixes += ["write train.colocate_all=true"] if shares else []
    return Problem(flag_of(largest), problem, ", ".join([*fixes, f"or {ELSEWHERE}" if fixes else ELSEWHERE]))


def flag_of(role: Role) -> str:
    """Return the flag that says how many devices a role has."""
    if role.name == ENGINE:
        return "vllm.num_engines" if role.num_actors > 1 else "vllm.tensor_parallel_size"
    if role.name == JUDGE:
        return "reward.judge.num_engines" if role.num_actors > 1 else "reward.judge.tensor_parallel_size"
    own = f"{role.name}.num_gpus_per_node"
    return own if own in flags_of(None) else f"{REWARD}.num_gpus_per_node"  # several reward models have equally many


def too_few_cpus(run: Run, placement: Placement) -> Iterator[Problem]:
    """Yield the problem of CPU slots that are fewer than the processes of a run take."""
    slots, needed = run.launch.num_cpus, math.ceil(placement.num_devices * CPUS_PER_DEVICE)
    if slots is not None and cluster_to_join(run.launch) is None and needed > slots and is_on_ray(run):
        problem = f"{slots}, and the run's {placement.num_devices} processes take {needed} CPU slots"
        yield Problem("launch.num_cpus", problem, f"write launch.num_cpus={needed}, or null")


def remarks(run: Run, devices: Devices) -> Iterator[str]:
    """Yield what to say about the devices of a run: those that are assumed, and those that stay idle."""
    used = max((placement.num_devices for placement in placements(run, devices)), default=0)
    if no_gpu_here(run, devices):
        there = f"the {number_of(used, 'GPU')} of the placement" if used else "a GPU"
        assumed = f"The plan assumes a machine with {there}, as rlhf-suite plan --gpu does"
        yield f"No GPU is visible here. {assumed}; to run it, start it there."
    elif not used:
        return
    elif devices.machine.device != "cuda":
        if devices.place == SLURM and run.launch.device == "auto":
            yield (
                "The plan assumes a job on nodes without GPUs, like this machine: write hydra.launcher.gpus_per_node "
                "or launch.device=cuda for GPUs."
            )
    elif devices.num_gpus is None:
        yield f"How many GPUs {where(run, devices)} has is not known here. The run takes {used}."
    else:
        yield from remarks_on_idle(used, devices)


def remarks_on_idle(used: int, devices: Devices) -> Iterator[str]:
    """Yield how many GPUs stay idle, of those that are known."""
    if devices.num_gpus is not None and used < devices.num_gpus:
        left = devices.num_gpus - used
        stay = "1 of them stays idle" if left == 1 else f"{left} of them stay idle"
        yield f"The run takes {used} of the {devices.num_gpus} GPUs of {devices.place}: {stay}."


def where(run: Run, devices: Devices) -> str:
    """Return where a run will be, for people."""
    return "the cluster" if devices.place == Devices.place else devices.place


def plan_workers(run: Run) -> WorkerPlan | None:
    """Return what is decided about a run with workers; None for others."""
    return resolve(run, machine(run.launch), route_bytes(run)) if run.task in PLANNED else None


def launch_of(run: Run, plan: WorkerPlan | None) -> LaunchConfig:
    """Return how a run is brought up: the section `launch`, with the size of Ray's object store that the plan has, in a
    task that may start Ray."""
    if not run.launch.has("object_store_mb"):
        return run.launch
    store = object_store_mb(run, (), device_kind(run.launch)) if plan is None else plan.object_store_mb
    return replace(run.launch, object_store_mb=store)
