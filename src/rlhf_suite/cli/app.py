"""`main`: what a command line asks for, checked and done. Exit codes: 0 done, 1 the run failed, 2 a mistake to mend."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING

from rlhf_suite.cli.arguments import CommandLine, parse
from rlhf_suite.config.problems import Problem, report

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf_suite.cli.preflight import Preflight
    from rlhf_suite.config.runs import Run

REFUSED, INTERRUPTED = 2, 130
# Answered by Hydra alone, whatever the configuration.
HYDRA_ONLY = ("--hydra-help", "--shell-completion")


def main(argv: list[str] | None = None) -> int:
    """Do what the command line says; returns the exit code. Help and completion import not even Hydra."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the console's encoding lacks is written out, and ends no run
        sys.stdout.reconfigure(errors="backslashreplace")
    line = parse(sys.argv[1:] if argv is None else argv)
    if line.options.get("--shell-completion") == "query=bash":
        from rlhf_suite.cli.complete import answer

        return answer()
    if "--help" in line.options:
        from rlhf_suite.cli.help import print_help

        with contextlib.suppress(BrokenPipeError):  # `| head` has seen enough
            return print_help(line)
        return 0
    if "--version" in line.options:
        from rlhf_suite.cli.versions import versions

        print("\n".join(versions()))
        return 0
    if any(option in line.options for option in HYDRA_ONLY):
        return hydra(line)
    return checked(line)


def checked(line: CommandLine) -> int:
    """Check the command line, then explain, show, sweep or run."""
    from rlhf_suite.cli.config_file import with_config_file
    from rlhf_suite.cli.inspections import inspect
    from rlhf_suite.cli.preflight import preflight

    line = with_config_file(line)
    found = preflight(line)
    if found.problems:
        return refuse(found.problems)
    if found.demo and not found.is_sweep:
        say(f"no model is named: taking demo={found.demo} (conf/demo/{found.demo}.yaml)")
        line.overrides.append(f"demo={found.demo}")
    if "--cfg" in line.options or "--info" in line.options:
        return hydra(line)
    if problems := inspect(found.runs):
        return refuse(problems)
    if any(run.explain for run in found.runs):
        from rlhf_suite.cli.explain import explain

        return explain(line, found)
    return sweep(line, found) if found.is_sweep else single(line, found)


def single(line: CommandLine, found: Preflight) -> int:
    """One run in a folder of its own, or in the one that it continues."""
    from rlhf_suite.cli.folders import for_run
    from rlhf_suite.cli.inspections import inspect
    from rlhf_suite.launch.environment import limited_rights

    (run,) = found.runs
    with limited_rights(run.launch):
        place = for_run(found)
        if isinstance(place, Problem):
            return refuse([place])
        if problems := inspect(found.runs, place.folder):
            place.give_up()
            return refuse(problems)
        if place.note:
            say(place.note)
        return run_in(place.folder, line, run)


def run_in(folder: Path, line: CommandLine, run: Run) -> int:
    """Run in a folder that no other run may use meanwhile."""
    from rlhf_suite.cli.folders import working_in
    from rlhf_suite.cli.run_log import recorded
    from rlhf_suite.locks import InUse

    try:
        with working_in(folder, run), recorded(folder / "run.log"):
            say(f"Run folder: {folder.absolute()}")
            put_folder(line, "run", folder)
            return hydra(line)
    except InUse as error:
        say(str(error))
        return REFUSED


def put_folder(line: CommandLine, kind: str, folder: Path) -> None:
    """Tell Hydra the folder of a run or of a sweep, in place of `run_dir`."""
    from rlhf_suite.cli.arguments import quoted
    from rlhf_suite.cli.overrides import key_of

    words = [word for word in line.overrides if key_of(word) != "run_dir"]
    line.overrides[:] = [*words, f"hydra.{kind}.dir={quoted(str(folder))}"]


def sweep(line: CommandLine, found: Preflight) -> int:
    """Many runs, each a process of its own (hydra/launcher), then their table."""
    from rlhf_suite.cli.folders import for_sweep
    from rlhf_suite.cli.summary import finish
    from rlhf_suite.launch.environment import limited_rights

    with limited_rights(found.runs[0].launch):
        folder = for_sweep(found)
        if isinstance(folder, Problem):
            return refuse([folder])
        say(f"Sweep folder: {folder.absolute()}")
        put_folder(line, "sweep", folder)
        code = hydra(line)
        return code if code == REFUSED else finish(folder) or code


def hydra(line: CommandLine) -> int:
    """Hand over to Hydra: it shows, sweeps or runs `job`."""
    import hydra as library

    from rlhf_suite.cli.compose import register
    from rlhf_suite.cli.execute import job
    from rlhf_suite.config.presets import conf_dir

    register()
    sys.argv = [sys.argv[0], *map(adding, line.for_hydra)]
    try:
        library.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(job)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def adding(word: str) -> str:
    """A word as Hydra wants it: the entries of a table are keys that are not there yet."""
    from rlhf_suite.config.flags import kind
    from rlhf_suite.config.names import flags_of

    info = flags_of(None).get(word.partition("=")[0])
    return f"++{word}" if info is not None and kind(info.type).base is dict else word


def refuse(problems: list[Problem]) -> int:
    print(report(problems), file=sys.stderr)
    return REFUSED


def say(text: str) -> None:
    """A remark beside the output, which may be YAML for another program."""
    print(text, file=sys.stderr, flush=True)
