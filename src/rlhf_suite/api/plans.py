"""`explain` and `plan`: what a call of `run` would do and need, without running it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_suite.api.explanation import show_explanation
from rlhf_suite.api.settings import ask, refuse
from rlhf_suite.api.words import shorten
from rlhf_suite.composition.arguments import CommandLine, key_of
from rlhf_suite.config.check.problems import report
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.disk import free_bytes
from rlhf_suite.errors import UserError
from rlhf_suite.machine_limits import machine_memory
from rlhf_suite.preflight.devices import devices_of, remarks_on_idle
from rlhf_suite.preflight.inspections.hub import hub_models_exist
from rlhf_suite.preflight.inspections.inspect_runs import inspect
from rlhf_suite.preflight.jobs import Preflight, preflight
from rlhf_suite.tracking.tables import as_text

if TYPE_CHECKING:
    from rich.console import Console

    from rlhf_suite.planner.needs import Estimate, Target


class Text(str):
    """A text that a notebook shows in lines of its own."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


def explain(task: str, **settings: Any) -> Text:
    """Return the tables of `explain=true`: batch sizes, placement, decisions, and where each value comes from. The
    settings are those of `run`.

    Raises:
        ConfigurationError: there are mistakes in them; all of them are in its `problems`.
        UserError: a value has no form that a run can take.
    """
    line, checked = ask(task, settings)
    refuse(inspect(checked.runs))
    problems = list[Any]()
    text = as_text(lambda console: problems.extend(show_explanation(console, line, checked)))
    return Text(text + (f"{report(problems)}\n" if problems else ""))


def plan(
    task: str,
    gpu: str | None = None,
    memory: float | None = None,
    mfu: float | None = None,
    tflops: float | None = None,
    **settings: Any,
) -> Planned:
    """Return what `rlhf-suite plan` prints, as an object: `fits`, `estimate` (bytes and seconds), `proposals`, and
    `str()`. The settings are those of `run`; neither the data nor the devices need to be here.

    `gpu` is a type of GPU, such as "h100-80" (None: the CPUs of this machine), `memory` GiB, `mfu` a share of the
    GPU's speed, and `tflops` a speed in 10^12 operations per second.

    Raises:
        ConfigurationError: there are mistakes in the settings; all of them are in its `problems`.
        UserError: the task does not train, or the type of GPU is not known.
    """
    line, checked = ask(task, settings)
    return plan_run(line, checked, Devices(gpu, memory, mfu, tflops))


@dataclass(frozen=True)
class Devices:
    """What is said of the devices to plan for, as in `plan`."""

    gpu: str | None = None
    memory: float | None = None
    mfu: float | None = None
    tflops: float | None = None


def target_of(asked: Devices, folder: Path = Path()) -> Target:
    """Return the devices to plan for, and on this machine what is free on the disk of the run's `folder`.

    Raises:
        UserError: the type of GPU is not known, or a number is not positive.
    """
    from rlhf_suite.planner.devices import find_device
    from rlhf_suite.planner.estimate import UTILISATION
    from rlhf_suite.planner.needs import Target

    for name in ("memory", "mfu", "tflops"):
        value = getattr(asked, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"--{name} {shorten(value)}: is not a number. Give one above 0")
        if value is not None and not 0 < value < (inf if name != "mfu" else 1 + 1e-9):
            raise UserError(f"--{name} {value}: must be above 0" + (" and at most 1" if name == "mfu" else ""))
    if not isinstance(asked.gpu, str | None):
        raise UserError(f"--gpu {shorten(asked.gpu)}: is not a text. Name a type of GPU, such as h100-80")
    device = None if asked.gpu is None else find_device(asked.gpu)
    memory = machine_memory() if device is None else device.memory
    flops = None if device is None else device.flops * (asked.mfu or UTILISATION)
    shared = Path("/dev/shm")
    return Target(
        device,
        memory if asked.memory is None else round(asked.memory * 2**30),
        flops if asked.tflops is None else asked.tflops * 1e12,
        disk=None if device else free_bytes(folder),
        shared_memory=None if device or not shared.is_dir() else shutil.disk_usage(shared).free,
    )


def only_run(checked: Preflight) -> Run | None:
    """Return the run to plan: the first of a sweep; None if there are problems.

    Raises:
        UserError: it does not train.
    """
    if checked.problems:
        return None
    run = checked.runs[0]
    if run.task in TRAINED:
        return run
    raise UserError(f"task={run.task}: only runs that train a model can be planned: task={', '.join(TRAINED)}")


def plan_run(line: CommandLine, checked: Preflight, asked: Devices) -> Planned:
    """Return the plan of a checked run, or of the first one of a sweep.

    Raises:
        UserError: the run has mistakes or does not train, or an option is wrong.
    """
    from rlhf_suite.planner.devices import cpu_flops
    from rlhf_suite.planner.estimate import CPU_UTILISATION, estimate

    target, run = target_of(asked, checked.folder), only_run(checked)
    problems = checked.problems if run is None else [*hub_models_exist(run)]
    if run is None or problems:
        raise UserError(report(problems))
    if target.flops is None:
        target = replace(target, flops=CPU_UTILISATION * cpu_flops(run.ds.precision))
    estimated = estimate(run, target)
    remarks = () if target.device is None else remarks_on_idle(estimated.num_devices, devices_of(run, checked))
    return Planned(estimated, tuple(remarks), line, run, checked.given, asked)


@dataclass(frozen=True)
class Planned:
    """The plan of a run: what it needs (`estimate`, bytes and seconds), and changes with which it would fit."""

    estimate: Estimate
    remarks: tuple[str, ...]
    line: CommandLine
    run: Run
    given: Collection[str]
    asked: Devices

    @property
    def fits(self) -> bool:
        """Whether the run has what it needs."""
        return self.estimate.fits

    @cached_property
    def proposals(self) -> list[tuple[tuple[str, ...], Estimate]]:
        """Changes with which a run that does not fit would: words of a command line, and what is needed then."""
        from rlhf_suite.planner.search import proposals

        if self.fits:
            return []
        replan = partial(plan_again, self.line, self.estimate.target)
        return list(proposals(self.run, self.given, self.estimate.target, replan))

    def show(self, console: Console) -> None:
        """Print the tables, and proposals if the run does not fit."""
        from rlhf_suite.planner.table import show, show_proposals

        show(console, self.estimate)
        for remark in self.remarks:
            console.print(remark, markup=False, highlight=False, soft_wrap=True)
        if not self.fits:
            show_proposals(console, self.proposals, lambda words: command_of(self.line, words, self.asked))

    def __str__(self) -> str:
        return as_text(self.show)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def with_words(line: CommandLine, words: Sequence[str]) -> CommandLine:
    """Return a command line with further words, in the place of those that set the same flags."""
    new = {key_of(word) for word in words}
    return replace(line, overrides=[*(word for word in line.overrides if key_of(word) not in new), *words])


def command_of(line: CommandLine, words: Sequence[str], asked: Devices) -> str:
    """Return the command that plans a command line with further words, for a shell."""
    options = [(f"--{name}", str(value)) for name, value in vars(asked).items() if value is not None]
    options += line.options.items()
    of_file = {*line.from_file, "plan"}
    written = [word for word in line.overrides if key_of(word) not in of_file]
    overrides = with_words(replace(line, overrides=written), words).overrides
    return shlex.join(["rlhf-suite", "plan", *(word for option in options for word in option if word), *overrides])


def plan_again(line: CommandLine, target: Target, words: tuple[str, ...]) -> Estimate | None:
    """Return the plan of a command line with further words; None if it is refused."""
    from rlhf_suite.planner.estimate import estimate

    other = only_run(preflight(with_words(line, words)))
    try:
        return None if other is None else estimate(other, target)
    except UserError:
        return None
