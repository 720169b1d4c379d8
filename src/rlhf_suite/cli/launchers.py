"""Start the jobs of a sweep that the preflight has composed and checked, each as a command line of its own.

`hydra/launcher=local` runs them as processes of this machine, `hydra/launcher=slurm` as an array of Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhf_suite.cli.arguments import CommandLine, key_of
from rlhf_suite.cli.preflight import Preflight
from rlhf_suite.cli.sweep import Job, extended
from rlhf_suite.config.formatting import quoted
from rlhf_suite.config.runs import LoopRun, Run, TrainedRun

MAX_NAME = 120  # characters of the name of a job in W&B and TensorBoard
# Settings of the sweep that mean nothing to a single job.
NOT_FOR_JOBS = ("hydra.mode", "hydra.run.", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher")


def launch(line: CommandLine, found: Preflight, folder: Path) -> None:
    """Start all jobs of a sweep and record them in `folder`. Wait for their ends, unless hydra.launcher.wait=false.

    Raises:
        UserError: the settings of the launcher do not fit the machine, or Slurm refuses the jobs.
    """
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
