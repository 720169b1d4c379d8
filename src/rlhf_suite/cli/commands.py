"""The commands beside runs, such as `rlhf-suite why <run folder>`: one table of what each takes and does."""

from __future__ import annotations

import json
import sys
from argparse import REMAINDER, SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf_suite.composition.arguments import PLAN_OPTIONS, parse
from rlhf_suite.disk import resolve_home
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable

if TYPE_CHECKING:
    from rlhf_suite.api.plans import Devices
    from rlhf_suite.composition.arguments import CommandLine
    from rlhf_suite.preflight.jobs import Preflight

OUTPUT_LIMIT, LINE_LIMIT = 100_000, 2000  # characters
FINE, FAULTY = 0, 1


def why(asked: Namespace) -> int:
    """Print what the run in a folder does."""
    from rlhf_suite.api.runs import find_record
    from rlhf_suite.api.why import describe_run

    code, lines = describe_run(find_record(asked.folder))
    print(printable("\n".join(lines), OUTPUT_LIMIT, keep_lines=True))
    return code


def report(asked: Namespace) -> int:
    """Write the page of runs."""
    from rlhf_suite.api.runs import write_report

    path = write_report(*asked.folders, file=asked.file)
    print(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return FINE


def watch(asked: Namespace) -> int:
    """Serve the page of runs until a signal asks to stop."""
    from rlhf_suite.api.runs import choose_runs, path_to
    from rlhf_suite.report.watch import watch as serve

    folders = [*map(path_to, asked.folders)]
    serve(lambda: choose_runs(folders), asked.port)
    return FINE


def port(text: str) -> int:
    """Return the number of a port.

    Raises:
        ArgumentTypeError: the text is not one.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < 2**16):
        raise ArgumentTypeError(f"{text} is not a port: give a number from 0 (a free port) to 65535")
    return int(text)


def sweep(asked: Namespace) -> int:
    """Print the table of a sweep."""
    from rlhf_suite.api.runs import path_to
    from rlhf_suite.sweeps.table import show_status

    return show_status(path_to(asked.folder))


def migrate(asked: Namespace) -> int:
    """Convert commands of OpenRLHF."""
    from rlhf_suite.cli.migrate import convert

    if not asked.words:
        asked.parser.error("name a script, or write a command of OpenRLHF")
    return convert(asked.words, asked.table)


def plan(asked: Namespace) -> int:
    """Print the plan of the run that the other words make."""
    from rlhf_suite.api import plans
    from rlhf_suite.composition.config_file import with_config_file
    from rlhf_suite.preflight.jobs import preflight

    line = with_config_file(parse(asked.rest))
    return print_plan(line, preflight(line), plans.Devices(asked.gpu, asked.memory, asked.mfu, asked.tflops))


def print_plan(line: CommandLine, checked: Preflight, devices: Devices | None = None) -> int:
    """Print the plan of a checked run, or of the first one of a sweep, for `devices` (None: those of this machine);
    return the exit code."""
    from rlhf_suite.api import plans
    from rlhf_suite.tracking.tables import open_console

    planned = plans.plan_run(line, checked, devices or plans.Devices())
    planned.show(open_console())
    if checked.first_of_several:
        print(checked.first_of_several)
    return FINE if planned.fits else FAULTY


def doctor(asked: Namespace) -> int:
    """Print what this machine lacks."""
    from rlhf_suite.doctor.examine import examine
    from rlhf_suite.doctor.findings import FAULT, NOTE

    states = list[str]()
    for finding in examine(asked.quick):
        print(printable(str(finding), LINE_LIMIT, keep_lines=True), flush=True)
        states.append(finding.state)
    faults, notes = states.count(FAULT), states.count(NOTE)
    print(f"{len(states)} findings, of which faults: {faults}, notes: {notes}")
    return FAULTY if faults else FINE


def schema(asked: Namespace) -> int:
    """Print the JSON schema of all flags."""
    from rlhf_suite.config.schema import schema as schema_of_flags

    json.dump(schema_of_flags(), sys.stdout, indent=1)
    print()
    return FINE


def gallery(asked: Namespace) -> int:
    """Copy the examples of the suite into a folder."""
    import shutil

    from rlhf_suite.config import shipped_folder

    target, remedy = resolve_home(asked.folder) / "experiments", "name another folder: rlhf-suite gallery <folder>"
    try:
        shutil.copytree(shipped_folder("experiments"), target, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError:
        raise UserError(f"{target} exists already; {remedy}") from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}; {remedy}") from None
    print(f"{target / 'README.md'} lists the examples")
    return FINE


@dataclass(frozen=True)
class Command:
    """A command: the function that does it and returns the exit code, what its words are called, what it is for in a
    line (`help`) and in full (`about`), and its arguments as argparse takes them, by name."""

    do: Callable[[Namespace], int]
    words: str
    help: str
    about: str
    arguments: dict[str, dict[str, Any]]
    takes_rest: bool = False  # words that are none of its arguments are those of a run

    def usage(self, name: str) -> str:
        """Return how the command is written."""
        options = "[options] " if any(argument.startswith("-") for argument in self.arguments) else ""
        return f"rlhf-suite {name} {options}{self.words}".rstrip()


COMMANDS = {
    "why": Command(
        why,
        "<run folder>",
        "what a run does, waits for or ended with",
        """\
Says how far a run is, what it waits for and since when, where code of yours is that it waits for, on which hosts its
processes are, and the end of the logs of those concerned; or how it ended. It reads files only, so it works for a run
on another node, and for one that was killed. The exit code is 0 if the run works or is done, 1 if it failed, was
stopped or killed, or stands still, and 2 if the folder has no run.""",
        {"folder": {"metavar": "<run folder>"}},
    ),
    "report": Command(
        report,
        "<folder>...",
        "a page with the curves and answers of runs, or of a sweep",
        """\
Writes report.html: in the folder of a run its page, in that of a sweep the means over seeds and all runs, and for
several run folders in this folder the runs beside each other. The page is one file that needs neither a server nor the
network: curves, times, samples and configuration. A run writes it at its end; this command writes it again, also for a
run that works or was killed.""",
        {
            "folders": {"metavar": "<folder>", "nargs": "+", "help": "of a run, or of a sweep"},
            "-o": {"metavar": "<file>", "dest": "file", "help": "write this file instead"},
        },
    ),
    "watch": Command(
        watch,
        "<folder>...",
        "the same page in a browser, refreshed during the runs",
        """\
Prints an address of this machine, for a browser on it, and serves the page of `rlhf-suite report` there until Ctrl-C:
that of a run, that of a sweep and one of each of its runs, or the runs in a folder beside each other and one page of
each. It shows new steps a few seconds after they end. Nobody can open it without the address, and it gives out only the
page. From another computer: ssh -L <port>:127.0.0.1:<port> <this machine>, then open the same address there.""",
        {
            "folders": {"metavar": "<folder>", "nargs": "+", "help": "of a run, of a sweep, or with runs in it"},
            "--port": {"metavar": "<number>", "type": port, "default": 0, "help": "a port of your choice"},
        },
    ),
    "sweep": Command(
        sweep,
        "status <folder>",
        "the jobs of a sweep, and how each of them is",
        """\
Prints the table of a sweep with the states that its runs have now, and writes it to summary.md in the folder. It is for
sweeps that nobody waits for (hydra.launcher.wait=false), and for a single run that was submitted to Slurm. The exit
code is 1 if a job failed, and 2 if the folder has no sweep.""",
        {"question": {"metavar": "status", "choices": ["status"]}, "folder": {"metavar": "<folder>"}},
    ),
    "migrate": Command(
        migrate,
        "<script or command>",
        "commands of OpenRLHF as command lines of this suite",
        """\
Prints a shell script: the same commands for this suite. Its comments say what differs (docs/from_openrlhf.md) and what
is lost. It reads a shell script with commands of OpenRLHF (- is stdin), or the words of a command, such as
deepspeed --module openrlhf.cli.train_sft --max_len 2048 ... The exit code is 0 if nothing is lost and the new commands
pass all checks of their flags, else 1.""",
        {
            "--table": {"action": "store_true", "help": "what becomes of each flag, as a table in Markdown"},
            "words": {"metavar": "<script or command>", "nargs": REMAINDER},
        },
    ),
    "plan": Command(
        plan,
        "<words of a run>",
        "the memory, disk and time that a run will need",
        """\
Says what memory each process of a run takes, and what disk and time it needs, without running it. The model needs no
weights, only its config.json, and the GPUs need not be here. The exit code is 0 if the run fits, 1 if it does not (then
with changes that make it fit), and 2 if the command line is wrong. plan=true on the command line of a run does the same
without these options.""",
        {name: {"type": kind, "help": meaning} for name, (kind, meaning) in PLAN_OPTIONS.items()},
        takes_rest=True,
    ),
    "doctor": Command(
        doctor,
        "",
        "what this machine lacks for runs, with the remedy",
        """\
Says what this machine and this environment offer to runs, and what they lack, each with its remedy: versions of
packages, the builds of torch and vLLM, the NVIDIA driver, GPUs and who uses them, shared memory, the host's name, and
the jail for programs. Then it uses the devices for a moment: a product in bf16, memory shared between processes, a sum
over processes, the imports of vLLM. It needs no Ray and half a minute. The exit code is 0 without a fault, 1 with one,
and 2 if the command line is wrong.""",
        {"--quick": {"action": "store_true", "help": "do not use the devices"}},
    ),
    "schema": Command(
        schema,
        "",
        "the JSON schema of all flags, for editors of YAML files",
        """\
Prints the JSON schema of a configuration: the names, types, bounds, choices and meanings of all flags of every task.
Editors with the YAML language server check and complete a file of flags that has the comment

    # yaml-language-server: $schema=flags.schema.json""",
        {},
    ),
    "gallery": Command(
        gallery,
        "[<folder>]",
        "copy the examples into the folder experiments",
        """\
Copies the examples of the suite into <folder>/experiments, by default ./experiments, where their commands work as
they are printed. README.md in it lists them, with what they cost and what checks them. Nothing that is there is
replaced.""",
        {"folder": {"metavar": "<folder>", "nargs": "?", "default": "."}},
    ),
}


class Parser(ArgumentParser):
    """A parser whose errors are those of a user, as all others of the suite are."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.format_usage()}{self.prog}: {message}")


def make_parser() -> Parser:
    """Return the parser of all commands, each with a parser of its own."""
    parser = Parser("rlhf-suite", allow_abbrev=False)
    parsers = parser.add_subparsers(required=True)
    for name, command in COMMANDS.items():
        own = parsers.add_parser(
            name,
            usage=command.usage(name),
            description=command.about,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for argument, settings in command.arguments.items():
            own.add_argument(argument, **{"help": SUPPRESS} | settings)
        own.set_defaults(do=command.do, parser=own, takes_rest=command.takes_rest)
    return parser


def ask(words: Sequence[str]) -> Namespace:
    """Return what the words of a command ask for, with those of a run as `rest`. Raises UserError, or SystemExit after
    the help that they ask for."""
    asked, rest = make_parser().parse_known_args(words)
    if rest and not asked.takes_rest:
        asked.parser.error(f"it has no argument {' '.join(rest)}")
    asked.rest = rest
    return asked


def do(words: Sequence[str]) -> int:
    """Do the command that is the first of the words; return the exit code."""
    try:
        asked = ask(words)
    except SystemExit:
        return FINE
    code: int = asked.do(asked)
    return code
