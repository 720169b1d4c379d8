"""`hydra.launcher`: how the jobs of a sweep are started on this machine, or the jobs of a sweep or a single run on
Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_suite.config.declarations.flags import FlagInfo, flag, walk

PREFIX = "hydra.launcher"


@dataclass
class LocalSettings:
    """Jobs as processes of this machine (`hydra/launcher=local`)"""

    parallel: int = flag(1, "Number of jobs at the same time", ge=1)
    gpus_per_job: int | None = flag(None, "Number of GPUs that each job sees; null: all GPUs", ge=1)


@dataclass
class SlurmSettings:
    """Jobs of Slurm (`hydra/launcher=slurm`). The settings have the same names as in submitit"""

    wait: bool = flag(True, "Wait for the jobs and print a table of them; false: return after the submission")
    poll_s: float = flag(10.0, "Seconds between two queries of squeue", gt=0)
    max_num_timeout: int = flag(20, ge=0)
    """How many times a job is queued again after its time limit or after the loss of a node"""
    name: str = flag("rlhf_suite", "Name of the jobs in squeue")
    timeout_min: int = flag(60, "Time limit of each job in minutes", ge=1)
    nodes: int = flag(1, "Number of nodes of each job; Ray uses all of them", ge=1)
    tasks_per_node: int = flag(1, choices=(1,))
    """Number of processes that srun starts on each node. The run starts all others itself"""
    cpus_per_task: int | None = flag(None, "Number of CPU cores on each node", ge=1)
    gpus_per_node: int | None = flag(None, "Number of GPUs on each node", ge=1)
    mem_gb: int | None = flag(None, "Memory on each node in GB", ge=1)
    slurm_partition: str | None = flag(None, "Partition, or several partitions with commas in quotes")
    slurm_account: str | None = flag(None, "Account to which the jobs are charged")
    slurm_qos: str | None = flag(None, "Quality of service")
    slurm_constraint: str | None = flag(None, "Features that nodes must have")
    slurm_gres: str | None = flag(None, "Generic resources, as in --gres: gpu:h100:8")
    slurm_array_parallelism: int = flag(256, "Number of jobs of a sweep at the same time", ge=1)
    slurm_signal_delay_s: int = flag(120, "Seconds before the time limit at which a run is asked to save", ge=1)
    slurm_setup: list[str] | None = flag(None)
    """Shell lines to run before the run starts, for example [module load cuda]"""
    slurm_srun_args: list[str] | None = flag(None)
    """Further arguments of srun, for example for a container: ['--container-image=<image>']"""
    slurm_python: str | None = flag(None)
    """Python interpreter that srun starts, if it is a different one on the nodes or in a container; null: the current
    one"""
    slurm_additional_parameters: dict[str, Any] = flag({}, "Any other line #SBATCH --<name>=<value>, by name")


LAUNCHERS: dict[str, type] = {"local": LocalSettings, "slurm": SlurmSettings}


def settings_of(launcher: str) -> list[FlagInfo]:
    """Return the settings of a launcher; those of a sweep without Hydra's other launchers."""
    return list(walk(LAUNCHERS[launcher], f"{PREFIX}."))
