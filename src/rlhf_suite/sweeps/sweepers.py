"""An installed sweeper of Hydra, such as Optuna's, chooses the jobs of a sweep from the results of those before.

The sweeper is asked for words as Hydra's own commands ask it, and the jobs that it wants are processes of this machine
like those of any other sweep. It gets one number of each: the metric of `ckpt.best_metric_key`, or the one that the
table of the sweep shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from rlhf_suite.composition.arguments import CommandLine, key_of
from rlhf_suite.composition.compose import hydra_ready
from rlhf_suite.config.check.formatting import quote
from rlhf_suite.config.declarations.metrics import HIGHER, LOWER, direction_of
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.errors import UserError
from rlhf_suite.preflight.jobs import Preflight
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.run_folders.sweep_folder import Job, extend_sweep
from rlhf_suite.sweeps.launchers import NOT_FOR_JOBS
from rlhf_suite.sweeps.local_jobs import run_here

Runner = Callable[[Sequence[Sequence[str]], int], list[JobReturn]]
WAYS = {"minimize": LOWER, "maximize": HIGHER}  # values of hydra.sweeper.direction
NAME = "hydra_plugins.rlhf_suite.JobsOfASweeper"  # Hydra takes launchers of this package alone


class JobsOfASweeper(Launcher):
    """The launcher that a sweeper gets: it hands the words of the jobs to the function that runs them."""

    run: Runner

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Keep the function that runs jobs, which stands in for the one that Hydra would call."""
        self.run = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs to their ends, and return the number of each."""
        return self.run(job_overrides, initial_job_idx)


def search(line: CommandLine, checked: Preflight, folder: Path) -> None:
    """Run the jobs that the sweeper of the command line asks for, and record them in `folder`.

    Raises:
        UserError: the sweeper refuses its settings, or gives up.
    """
    folder = folder.absolute()
    if (key := choose_key(checked)) is not None:
        check_direction(checked, key)
    with hydra_ready():
        context = HydraContext(GlobalHydra.instance().config_loader(), callbacks=cast(Any, None))
        config = OmegaConf.create({"hydra": OmegaConf.to_container(checked.hydra)})
        with read_write(config), open_dict(config):
            config.hydra.launcher = {"_target_": NAME}
            config.hydra.sweep.dir = str(folder)
        plugins = Plugins.instance()
        plugins.class_name_to_class[NAME] = JobsOfASweeper
        name = checked.hydra.runtime.choices["hydra/sweeper"]
        varied = list_varied_words(line)
        try:
            sweeper = plugins.instantiate_sweeper(
                hydra_context=context, task_function=cast(Any, runner(line, checked, folder, varied)), config=config
            )
            sweeper.sweep(varied)
        except UserError:
            raise
        except Exception as error:  # of a foreign plugin, whose errors are of any kind
            raise UserError(f"hydra/sweeper={name}: {type(error).__name__}: {error}") from error


def runner(line: CommandLine, checked: Preflight, folder: Path, varied: Sequence[str]) -> Runner:
    """Return the function that runs jobs by what varies between them."""
    fixed = [word for word in line.overrides if word not in varied and not word.startswith(NOT_FOR_JOBS)]
    if line.own_presets is not None:
        fixed.append(f"--config-dir={line.own_presets.resolve()}")
    options: dict[str, Any] = OmegaConf.to_container(checked.hydra.launcher, resolve=True)  # type: ignore[assignment]

    def run(wanted: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        jobs = [job_of(number, [*fixed], [*words], folder) for number, words in enumerate(wanted, first)]
        run_here(extend_sweep(folder, jobs), jobs, options["parallel"], options["gpus_per_job"])
        return [result_of(job, checked) for job in jobs]

    return run


def list_varied_words(line: CommandLine) -> list[str]:
    """Return the overrides with several values, apart from settings of Hydra."""
    parse = OverridesParser.create().parse_override
    words = [word for word in line.overrides if not key_of(word).startswith(("hydra.", "hydra/"))]
    return [word for word in words if parse(word).is_sweep_override()]


def job_of(number: int, fixed: list[str], varied: list[str], folder: Path) -> Job:
    """Return a job with a command line and a folder of its own."""
    place = folder / str(number)
    own = [f"hydra.run.dir={quote(str(place))}", f"hydra.job.num={number}", "hydra.mode=RUN"]
    return Job(number, varied, str(place), [*fixed, *varied, *own])


def choose_key(checked: Preflight) -> str | None:
    """Return the metric by which a sweep chooses, where its flags name one."""
    run = checked.runs[0]
    return run.ckpt.best_metric_key if run.task in TRAINED else None


def check_direction(checked: Preflight, metric: str) -> None:
    """Raise UserError if the sweeper is told to look for the worst of a metric. What sweepers do not call minimize or
    maximize is theirs."""
    asked = OmegaConf.select(checked.hydra, "sweeper.direction")
    wanted, better = WAYS.get(str(getattr(asked, "name", asked))), direction_of(metric)
    if wanted is not None and better is not None and wanted != better:
        right = next(way for way, is_better in WAYS.items() if is_better == better)
        raise UserError(
            f"hydra.sweeper.direction={getattr(asked, 'name', asked)} looks for the worst job: the sweeper chooses by "
            f"{metric}, of which a {better} value is better. Write hydra.sweeper.direction={right}, or another "
            "ckpt.best_metric_key"
        )


def result_of(job: Job, checked: Preflight) -> JobReturn:
    """Return what the sweeper learns of a job that has ended: its number, or why it has none.

    Raises:
        UserError: the sweeper looks for the worst of that number.
    """
    key = choose_key(checked)
    metrics = RunFolder(Path(job.folder)).status().get("metrics") or {}
    name, value = (key, metrics[key]) if key is not None and key in metrics else (job.metric, job.value)
    if job.state == "done" and value is not None:
        check_direction(checked, name)
        return JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED, _return_value=value)
    reason = job.error or "it has no metric"
    return JobReturn(
        overrides=job.overrides,
        status=JobStatus.FAILED,
        _return_value=UserError(f"job {job.number} ({' '.join(job.overrides)}): {reason}"),
    )
