"""Two launchers that start each job of a sweep as a command line of its own: on this machine, or on Slurm.

Hydra executes plugins outside sys.modules, where dataclasses cannot resolve postponed annotations.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

if TYPE_CHECKING:
    from rlhf_suite.cli.sweep import Job, Sweep

REFUSED = 2  # exit code
MAX_NAME = 120  # characters of a job's name in W&B and TensorBoard
# Settings of the sweep that mean nothing to a single job.
NOT_FOR_JOBS = ("hydra.mode", "hydra.run.", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher")


class CommandLauncher(Launcher):
    """Turns the jobs of a sweep into command lines; subclasses run them."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {name: _plain(value) for name, value in settings.items()}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context = hydra_context
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from rlhf_suite.cli.sweep import extended
        from rlhf_suite.errors import UserError

        folder = Path(self.config.hydra.sweep.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        common = set.intersection(*map(set, job_overrides)) if len(job_overrides) > 1 else set()
        jobs = [self._job(folder, initial_job_idx + i, list(words), common) for i, words in enumerate(job_overrides)]
        try:
            self.run(extended(folder, jobs), jobs)
        except UserError as error:  # Hydra would add a traceback
            sys.stderr.write(f"{error}\n")
            raise SystemExit(REFUSED) from error
        return [_returned(job) for job in jobs]

    def run(self, sweep: "Sweep", jobs: "list[Job]") -> None:
        raise NotImplementedError

    def _job(self, folder: Path, number: int, overrides: list[str], common: set[str]) -> "Job":
        from rlhf_suite.cli.arguments import quoted
        from rlhf_suite.cli.sweep import Job

        composed = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(composed):
            composed.hydra.job.num = number
            composed.hydra.job.id = str(number)
        run_folder = str(folder / composed.hydra.sweep.subdir)
        settings = [word for word in self.config.hydra.overrides.hydra if not word.startswith(NOT_FOR_JOBS)]
        place = [f"hydra.run.dir={quoted(run_folder)}", f"hydra.job.num={number}", "hydra.mode=RUN"]
        varied = " ".join([str(number), *(word for word in overrides if word not in common)])
        names = _names_for_loggers(composed, group=folder.name, name=varied[:MAX_NAME])
        return Job(number, overrides, run_folder, [*self._config_dirs(), *settings, *overrides, *names, *place])

    def _config_dirs(self) -> list[str]:
        sources = self.config.hydra.runtime.config_sources
        return [f"--config-dir={source.path}" for source in sources if source.provider == "command-line"]


class LocalLauncher(CommandLauncher):
    """`parallel` processes at a time on this machine."""

    def run(self, sweep: "Sweep", jobs: "list[Job]") -> None:
        from rlhf_suite.cli.local_jobs import run_here

        run_here(sweep, jobs, self.settings["parallel"], self.settings["gpus_per_job"])


class SlurmLauncher(CommandLauncher):
    """One Slurm array; waits for it unless `wait` is false."""

    def run(self, sweep: "Sweep", jobs: "list[Job]") -> None:
        from rlhf_suite.cli.slurm_jobs import squeue, submit, watch

        resources = {name: value for name, value in self.settings.items() if value not in (None, [], {})}
        wait, poll_s = resources.pop("wait"), resources.pop("poll_s")
        submitted = submit(sweep, jobs, resources)
        if wait:
            watch(sweep, submitted, poll_s, squeue)


def _names_for_loggers(composed: DictConfig, group: str, name: str) -> list[str]:
    """Return the words that name a job in W&B and TensorBoard, where its task logs and the user has not named it."""
    from rlhf_suite.cli.arguments import quoted

    wanted = {"logger.wandb.group": group, "logger.wandb.run_name": name}
    missing = object()
    return [
        f"{key}={quoted(text)}"
        for key, text in wanted.items()
        if OmegaConf.select(composed, key, default=missing) is None
    ]


def _returned(job: "Job") -> JobReturn:
    """What sweepers see: the job's metric, NaN when it failed. An exception here would hide the other jobs' results."""
    result = JobReturn(overrides=job.overrides, working_dir=job.folder, status=JobStatus.COMPLETED)
    result.return_value = math.nan if job.value is None else job.value
    return result


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


@dataclass
class LocalSettings:
    """hydra.launcher.* of hydra/launcher=local"""

    _target_: str = f"{__name__}.LocalLauncher"
    parallel: int = 1  # jobs at a time
    gpus_per_job: int | None = None  # null: each job sees all GPUs


@dataclass
class SlurmSettings:
    """hydra.launcher.* of hydra/launcher=slurm; the names are submitit's"""

    _target_: str = f"{__name__}.SlurmLauncher"
    wait: bool = True  # false: return after the submission
    poll_s: float = 10.0  # seconds between two looks at squeue
    max_num_timeout: int = 20  # requeues at the time limit
    name: str = "rlhf_suite"
    timeout_min: int = 60
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    mem_gb: int | None = None
    slurm_partition: str | None = None
    slurm_account: str | None = None
    slurm_qos: str | None = None
    slurm_constraint: str | None = None
    slurm_gres: str | None = None
    slurm_array_parallelism: int = 256  # jobs at a time
    slurm_signal_delay_s: int = 120  # warning before the time limit
    slurm_setup: list[str] | None = None  # shell lines before srun
    slurm_srun_args: list[str] | None = None
    slurm_additional_parameters: dict[str, Any] = field(default_factory=dict)  # any other #SBATCH line


for _name, _node in (("local", LocalSettings), ("slurm", SlurmSettings)):
    ConfigStore.instance().store(group="hydra/launcher", name=_name, node=_node, provider="rlhf_suite")
