"""Start the jobs of a sweep that the preflight has composed and checked, each as a command line of its own.

`hydra/launcher=local` runs them as processes of this machine, `hydra/launcher=slurm` as an array of Slurm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from itertools import compress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhf_suite.composition.arguments import CommandLine, key_of
from rlhf_suite.config.check.formatting import quote
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import TRAINING
from rlhf_suite.preflight.jobs import Preflight
from rlhf_suite.run_folders.earlier_runs import describe_finished, is_earlier, resumes
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.run_folders.sweep_folder import Job, Sweep, extend_sweep, read
from rlhf_suite.sweeps.local_jobs import run_here
from rlhf_suite.sweeps.slurm_jobs import Main, squeue, submit, watch

MAX_NAME = 120  # characters of the name of a job in W&B and TensorBoard
# Settings of the sweep that mean nothing to a single job. The choice of the launcher is not among them: a preset may
# hold settings that only this launcher has.
NOT_FOR_JOBS = ("hydra.mode", "hydra.run.", "hydra.sweep", "hydra/sweeper", "hydra.launcher")


def launch(line: CommandLine, checked: Preflight, folder: Path, main: Main) -> None:
    """Start the jobs of a sweep, or a single run on Slurm, and record them in `folder`. Wait for their ends, unless
    hydra.launcher.wait=false. A job of Slurm calls `main` with the words of its command line.

    A job that continues its run (ckpt.load_enable=true) is not started if the run is done.

    Raises:
        UserError: the settings of the launcher do not fit the machine, or Slurm refuses the jobs.
    """
    jobs = list(jobs_of(line, checked, folder.absolute()))
    sweep = extend_sweep(folder.absolute(), jobs)
    is_done = [
        describe_finished(run, Path(job.folder)) is not None for run, job in zip(checked.runs, jobs, strict=True)
    ]
    for job in compress(jobs, is_done):
        sweep.keep(job)
    if left := [job for job, done in zip(jobs, is_done, strict=True) if not done]:
        start(sweep, left, checked, main)


def jobs_of(line: CommandLine, checked: Preflight, folder: Path) -> Iterator[Job]:
    """Yield the jobs of a sweep in `folder`, each with a command line of its own; a single run is in `folder`
    itself."""
    every = [set(words) for words, _ in checked.jobs]
    common = set.intersection(*every) if len(every) > 1 else set()
    own = [word for word in line.overrides if key_of(word).startswith(("hydra.", "hydra/"))]
    settings = [word for word in own if not word.startswith(NOT_FOR_JOBS)]
    if line.own_presets is not None:
        settings.append(f"--config-dir={line.own_presets.resolve()}")
    here = places(checked, folder) if checked.is_sweep else [(0, folder)]
    for run, (words, _), (number, place) in zip(checked.runs, checked.jobs, here, strict=True):
        varied = " ".join([str(number), *(word for word in words if word not in common)])
        names = names_for_loggers(run, folder.name, varied[:MAX_NAME]) if checked.is_sweep else ()
        own = [f"hydra.run.dir={quote(str(place))}", f"hydra.job.num={number}", "hydra.mode=RUN"]
        yield Job(number, words, str(place), [*settings, *words, *names, *own])


def start(sweep: Sweep, jobs: list[Job], checked: Preflight, main: Main) -> None:
    """Start these jobs of a sweep by its launcher."""
    options: dict[str, Any] = OmegaConf.to_container(checked.hydra.launcher, resolve=True)  # type: ignore[assignment]
    if checked.hydra.runtime.choices["hydra/launcher"] == "local":
        run_here(sweep, jobs, options["parallel"], options["gpus_per_job"])
    else:
        wait, poll_s = options.pop("wait"), options.pop("poll_s")
        resources = {name: value for name, value in options.items() if value not in (None, [], {})}
        submitted = submit(sweep, jobs, resources, main)
        if wait:
            watch(sweep, submitted, poll_s, squeue)


def places(checked: Preflight, folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the number and the folder of each job of a sweep in `folder`.

    Where an earlier sweep is continued there, a job has those of the earlier job with the same words, whatever values
    were added to the command line since; else of the job of its number if it may continue that run; and a new job gets
    a number that is free.
    """
    before = read(folder)
    earlier = {} if before is None else {job.number: job for job in before.jobs}
    same = {cell(job.overrides): job.number for job in earlier.values()}
    taken = set(earlier)
    for own, (run, (words, subfolder)) in enumerate(zip(checked.runs, checked.jobs, strict=True)):
        number = same.get(cell(words), own) if resumes(run) else own
        is_new = resumes(run) and cell(words) not in same
        if is_new and own in taken and not is_earlier(RunFolder(folder / subfolder), run):
            number = next(count for count in itertools.count() if count not in taken)
        taken.add(number)
        yield number, folder / (str(number) if subfolder == str(own) else subfolder)


def cell(words: Iterable[str]) -> frozenset[str]:
    """Return what makes a job this one among those of its sweep, whether it begins or continues."""
    return frozenset(word for word in words if key_of(word) not in ("ckpt.load_enable", "run_dir"))


def names_for_loggers(run: Run, group: str, name: str) -> Iterator[str]:
    """Yield the words that name a job in W&B and TensorBoard, where its task logs and the user has not named it."""
    if run.task in TRAINING:
        for key, text in (("group", group), ("run_name", name)):
            if getattr(run.logger.wandb, key) is None:
                yield f"logger.wandb.{key}={quote(text)}"
