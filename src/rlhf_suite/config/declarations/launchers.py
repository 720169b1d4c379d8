"""`hydra.launcher`: how the jobs of a sweep are started on this machine, or the jobs of a sweep or a single run on
Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_suite.config.declarations.flags import FlagInfo, flag, walk

PREFIX = "hydra.launcher"


@dataclass
class LocalSettings:
    """Processes of this machine (`hydra/launcher=local`)"""

    parallel: int = flag(1, "Jobs at a time", ge=1)
    gpus_per_job: int | None = flag(None, "GPUs that each job sees; null: all", ge=1)


@dataclass
class SlurmSettings:
    """Jobs of Slurm (`hydra/launcher=slurm`); the names are those of submitit"""

    wait: bool = flag(True, "Wait for the jobs and print their table; false: return after the submission")
    poll_s: float = flag(10.0, "Seconds between two questions to squeue", gt=0)
    max_num_timeout: int = flag(20, "How often a job is queued again at its time limit, or after it lost a node", ge=0)
    name: str = flag("rlhf_suite", "Name of the jobs in squeue")
    timeout_min: int = flag(60, "Time limit of each job in minutes", ge=1)
    nodes: int = flag(1, "Nodes of each job; Ray spans them", ge=1)
    tasks_per_node: int = flag(1, "Processes that srun starts on a node; the run starts all others", choices=(1,))
    cpus_per_task: int | None = flag(None, "CPU cores on each node", ge=1)
    gpus_per_node: int | None = flag(None, "GPUs on each node", ge=1)
    mem_gb: int | None = flag(None, "Memory on each node in GB", ge=1)
    slurm_partition: str | None = flag(None, "Partition, or several with commas in quotes")
    slurm_account: str | None = flag(None, "Account that pays")
    slurm_qos: str | None = flag(None, "Quality of service")
    slurm_constraint: str | None = flag(None, "Features that the nodes must have")
    slurm_gres: str | None = flag(None, "Generic resources, as --gres takes them: gpu:h100:8")
    slurm_array_parallelism: int = flag(256, "Jobs of a sweep at a time", ge=1)
    slurm_signal_delay_s: int = flag(120, "How long before the time limit a run is asked to save", ge=1)
    slurm_setup: list[str] | None = flag(None, "Shell lines before the run, for example [module load cuda]")
    slurm_srun_args: list[str] | None = flag(None)
    """Further arguments of srun, for example of a container: ['--container-image=<image>']"""
    slurm_python: str | None = flag(None)
    """The Python that srun starts, where it is another one on the nodes or in a container; null: this one"""
    slurm_additional_parameters: dict[str, Any] = flag({}, "Any other line #SBATCH --<name>=<value>, by name")


LAUNCHERS: dict[str, type] = {"local": LocalSettings, "slurm": SlurmSettings}


def settings_of(launcher: str) -> list[FlagInfo]:
    """Return the settings of a launcher; those of a sweep without Hydra's other launchers."""
    return list(walk(LAUNCHERS[launcher], f"{PREFIX}."))
