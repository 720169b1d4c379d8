"""Start the jobs of a sweep that the preflight has composed and checked, each as a command line of its own.

`hydra/launcher=local` runs them as processes of this machine, `hydra/launcher=slurm` as an array of Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rlhf_suite.cli.arguments import CommandLine, key_of, quoted
from rlhf_suite.config.runs import LoopRun, Run, TrainedRun

if TYPE_CHECKING:
    from rlhf_suite.cli.preflight import Preflight

MAX_NAME = 120  # characters of the name of a job in W&B and TensorBoard
# Settings of the sweep that mean nothing to a single job.
NOT_FOR_JOBS = ("hydra.mode", "hydra.run.", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher")


@dataclass
class LocalSettings:
    """hydra.launcher.* of hydra/launcher=local"""

    parallel: int = 1  # jobs at a time
    gpus_per_job: int | None = None  # null: each job sees all GPUs


@dataclass
class SlurmSettings:
    """hydra.launcher.* of hydra/launcher=slurm; the names are those of submitit"""

    wait: bool = True  # false: return after the submission
    poll_s: float = 10.0  # seconds between two queries of squeue
    max_num_timeout: int = 20  # how often a job is queued again at its time limit
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


LAUNCHERS: dict[str, type] = {"local": LocalSettings, "slurm": SlurmSettings}


def launch(line: CommandLine, found: Preflight, folder: Path) -> None:
    """Start all jobs of a sweep and record them in `folder`. Wait for their ends, unless hydra.launcher.wait=false.

    Raises:
        UserError: the settings of the launcher do not fit the machine, or Slurm refuses the jobs.
    """
    from rlhf_suite.cli.sweep import Job, extended

    every = [set(words) for words, _ in found.jobs]
    common = set.intersection(*every) if len(every) > 1 else set()
    own = [word for word in line.overrides if key_of(word).startswith(("hydra.", "hydra/"))]
    settings = [word for word in own if not word.startswith(NOT_FOR_JOBS)]
    if line.own_presets is not None:
        settings.append(f"--config-dir={line.own_presets.resolve()}")
    jobs = []
    for number, (run, (words, subfolder)) in enumerate(zip(found.runs, found.jobs, strict=True)):
        varied = " ".join([str(number), *(word for word in words if word not in common)])
        names = names_for_loggers(run, folder.name, varied[:MAX_NAME])
        place = folder.absolute() / subfolder
        own = [f"hydra.run.dir={quoted(str(place))}", f"hydra.job.num={number}", "hydra.mode=RUN"]
        jobs.append(Job(number, words, str(place), [*settings, *words, *names, *own]))
    sweep = extended(folder.absolute(), jobs)
    options: dict[str, Any] = OmegaConf.to_container(found.hydra.launcher, resolve=True)  # type: ignore[assignment]
    if found.hydra.runtime.choices["hydra/launcher"] == "local":
        from rlhf_suite.cli.local_jobs import run_here

        run_here(sweep, jobs, options["parallel"], options["gpus_per_job"])
    else:
        from rlhf_suite.cli.slurm_jobs import squeue, submit, watch

        wait, poll_s = options.pop("wait"), options.pop("poll_s")
        submitted = submit(sweep, jobs, {name: value for name, value in options.items() if value not in (None, [], {})})
        if wait:
            watch(sweep, submitted, poll_s, squeue)


def names_for_loggers(run: Run, group: str, name: str) -> Iterator[str]:
    """Yield the words that name a job in W&B and TensorBoard, where its task logs and the user has not named it."""
    if isinstance(run, TrainedRun | LoopRun):
        for key, text in (("group", group), ("run_name", name)):
            if getattr(run.logger.wandb, key) is None:
                yield f"logger.wandb.{key}={quoted(text)}"
