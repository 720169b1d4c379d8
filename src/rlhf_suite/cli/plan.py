"""`rlhf-suite plan <words>`, or `plan=true` among the words of a run: what it will need, before it waits in a queue."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.composition.arguments import PLAN_OPTIONS
from rlhf_suite.config.problems import report
from rlhf_suite.errors import UserError
from rlhf_suite.tracking.tables import as_text

if TYPE_CHECKING:
    from rich.console import Console

    from rlhf_suite.composition.arguments import CommandLine
    from rlhf_suite.config.runs import AnyTrainedRun
    from rlhf_suite.planner.needs import Estimate, Target
    from rlhf_suite.preflight.jobs import Preflight

SYNOPSIS = "rlhf-suite plan [--gpu NAME] [--memory GIB] [--mfu SHARE] [--tflops N] <words of a command line>"
ABOUT = """Says what memory each process of a run takes, and what disk and time it needs, without running it. The model
needs no weights, only its config.json, and the GPUs need not be here. The exit code is 0 if the run fits, 1 if it does
not (then with changes that make it fit), and 2 if the command line is wrong. plan=true on the command line of a run
does the same without these options."""

OPTIONS = argparse.ArgumentParser("rlhf-suite plan", SYNOPSIS, ABOUT, allow_abbrev=False)
for name, (kind, help) in PLAN_OPTIONS.items():
    OPTIONS.add_argument(name, type=kind, help=help)
USAGE = OPTIONS.format_help().rstrip()

FITS, TOO_LARGE, REFUSED = 0, 1, 2


def main(words: Sequence[str]) -> int:
    """Print the plan of the run that the words make; return the exit code."""
    from rlhf_suite.composition.arguments import parse
    from rlhf_suite.composition.config_file import with_config_file
    from rlhf_suite.preflight.jobs import preflight

    asked, rest = OPTIONS.parse_known_args(list(words))
    line = with_config_file(parse(rest))
    return print_plan(line, preflight(line), asked)


def target_of(asked: argparse.Namespace) -> Target:
    """Return the devices to plan for.

    Raises:
        UserError: the type of GPU is not known, or a number is not positive.
    """
    from rlhf_suite.planner.devices import find_device
    from rlhf_suite.planner.estimate import UTILISATION
    from rlhf_suite.planner.needs import Target

    for name in ("memory", "mfu", "tflops"):
        if (value := getattr(asked, name)) is not None and not value > 0:
            raise UserError(f"--{name} {value}: must be above 0")
    device = None if asked.gpu is None else find_device(asked.gpu)
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = here if device is None else device.memory
    flops = None if device is None else device.flops * (asked.mfu or UTILISATION)
    shared = Path("/dev/shm")
    return Target(
        device,
        memory if asked.memory is None else round(asked.memory * 2**30),
        flops if asked.tflops is None else asked.tflops * 1e12,
        disk=None if device else shutil.disk_usage(Path.cwd()).free,
        shared_memory=None if device or not shared.is_dir() else shutil.disk_usage(shared).free,
    )


def only_run(checked: Preflight) -> AnyTrainedRun | None:
    """Return the run to plan: the first of a sweep; None if there are problems.

    Raises:
        UserError: it does not train.
    """
    from rlhf_suite.config.runs import TASKS, AnyTrainedRun

    if checked.problems:
        return None
    run = checked.runs[0]
    if isinstance(run, AnyTrainedRun):
        return run
    known = [name for name, kind in TASKS.items() if issubclass(kind, AnyTrainedRun)]
    raise UserError(f"task={run.task}: only runs that train a model can be planned: task={', '.join(known)}")


def print_plan(line: CommandLine, checked: Preflight, asked: argparse.Namespace | None = None) -> int:
    """Print the plan of a checked run, or of the first one of a sweep; return the exit code.

    `asked` are the options of `rlhf-suite plan`; None: those of `plan=true`, which has none.
    """
    from rich.console import Console

    try:
        planned = plan_run(line, checked, asked or OPTIONS.parse_args([]))
        planned.show(Console())
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    if checked.first_of_several:
        print(checked.first_of_several)
    return FITS if planned.fits else TOO_LARGE


def plan_run(line: CommandLine, checked: Preflight, asked: argparse.Namespace) -> Planned:
    """Return the plan of a checked run, or of the first one of a sweep.

    Raises:
        UserError: the run has mistakes or does not train, or an option is wrong.
    """
    from rlhf_suite.planner.devices import cpu_flops
    from rlhf_suite.planner.estimate import CPU_UTILISATION, estimate
    from rlhf_suite.preflight.devices import devices_of, remarks_on_idle

    target, run = target_of(asked), only_run(checked)
    if run is None:
        raise UserError(report(checked.problems))
    if target.flops is None:
        target = replace(target, flops=CPU_UTILISATION * cpu_flops(run.ds.param_dtype))
    estimated = estimate(run, target)
    remarks = () if target.device is None else remarks_on_idle(estimated.num_devices, devices_of(run, checked))
    return Planned(estimated, tuple(remarks), line, run, checked.given, asked)


@dataclass(frozen=True)
class Planned:
    """The plan of a run: what it needs (`estimate`, bytes and seconds), and changes with which it would fit."""

    estimate: Estimate
    remarks: tuple[str, ...]
    line: CommandLine
    run: AnyTrainedRun
    given: Collection[str]
    asked: argparse.Namespace

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
    from rlhf_suite.composition.arguments import key_of

    new = {key_of(word) for word in words}
    return replace(line, overrides=[*(word for word in line.overrides if key_of(word) not in new), *words])


def command_of(line: CommandLine, words: Sequence[str], asked: argparse.Namespace) -> str:
    """Return the command that plans a command line with further words, for a shell."""
    from rlhf_suite.composition.arguments import key_of

    options = [(f"--{name}", str(value)) for name, value in vars(asked).items() if value is not None]
    options += line.options.items()
    of_file = {*line.from_file, "plan"}
    written = [word for word in line.overrides if key_of(word) not in of_file]
    overrides = with_words(replace(line, overrides=written), words).overrides
    return shlex.join(["rlhf-suite", "plan", *(word for option in options for word in option if word), *overrides])


def plan_again(line: CommandLine, target: Target, words: tuple[str, ...]) -> Estimate | None:
    """Return the plan of a command line with further words; None if it is refused."""
    from rlhf_suite.planner.estimate import estimate
    from rlhf_suite.preflight.jobs import preflight

    other = only_run(preflight(with_words(line, words)))
    try:
        return None if other is None else estimate(other, target)
    except UserError:
        return None
