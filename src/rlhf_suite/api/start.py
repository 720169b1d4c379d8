"""`check` and `run`: what a call asks for is checked as a command line is, and a run is a process of its own."""

from __future__ import annotations

import codecs
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_suite.api.runs import Run
from rlhf_suite.api.screen import Result, Screen
from rlhf_suite.api.settings import ask, check_places, find_place
from rlhf_suite.composition.arguments import CommandLine, words_of_options
from rlhf_suite.config.check.formatting import quote
from rlhf_suite.config.check.problems import ConfigurationError, Problem
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.preflight.folders import for_run
from rlhf_suite.preflight.jobs import Preflight

REFUSED, STOPPED = 2, (128 + signal.SIGINT, 128 + signal.SIGTERM)
FOLDERS = ("run_dir=", "hydra.run.dir=", "hydra.sweep.dir=")
POLL_S = 2.0
SAID = 20  # last lines of a run that the message of a refusal has


def check(task: str, **settings: Any) -> list[Problem]:
    """Return every mistake in what a call of `run` would do: the flag (`key`), `what` is wrong, and the `fix`. Nothing
    is started or printed.

    Raises:
        UserError: a value has no form that a run can take.
    """
    try:
        check_places(ask(task, settings).checked)
    except ConfigurationError as error:
        return error.problems
    return []


def run(task: str, **settings: Any) -> Run:
    """Run a task in a process of its own, show what it prints, and return it when it is done.

    Settings are flags (`actor={"adam": {"lr": 1e-6}}` or `**{"actor.adam.lr": 1e-6}`), presets
    (`experiment="grpo"`) and short names: `model`, `data` (a path, a list of dicts or a data set), and `reward`,
    `loss`, `estimator` and `agent`, which take functions (docs/own_code.md). `run_dir` names the folder. To interrupt
    the call stops the run, which `{"ckpt.load_enable": True}` continues.

    Raises:
        ConfigurationError: there are mistakes in it; all of them are in its `problems`.
        UserError: the run was refused later.
        RunError: the run failed.
        KeyboardInterrupt: it was interrupted, and has stopped.
    """
    line, checked = ask(task, settings)
    if checked.is_sweep or checked.is_submitted:
        problem = "rs.run makes one run, as a process of this machine"
        raise ConfigurationError.of("hydra", problem, "use rs.sweep for several runs, and for jobs of Slurm")
    refuse_chat(checked)
    if checked.runs[0].explain:
        raise ConfigurationError.of("explain", "rs.run makes a run and does not explain it", "use rs.explain")
    place = find_place(checked, for_run)
    result = Run(place.folder.resolve())
    failed = start(line, place.folder, result)
    if failed is not None:
        raise RunError(f"the run in {place.folder} {result.status}: {result.error or failed}")
    return result


def refuse_chat(checked: Preflight) -> None:
    """Raise ConfigurationError if a run would read what someone types: its process has no terminal to read from."""
    if any(run.has("chat") for run in checked.runs):
        problem = "chat reads what you type, and a run that Python starts reads nothing"
        raise ConfigurationError.of("task", problem, "use rlhf-suite task=chat")


def start(line: CommandLine, folder: Path, result: Result) -> str | None:
    """Do what a command line says in `folder`, in a process of its own, and show it with the `result` that is there.
    Return the last lines that it said if it failed; None if it did not.

    Raises:
        UserError: it was refused.
        KeyboardInterrupt: it was interrupted, and has stopped.
    """
    words = [word for word in (*words_of_options(line.options), *line.overrides) if not word.startswith(FOLDERS)]
    code, said = follow([*words, f"run_dir={quote(str(folder))}"], Screen(result))
    if code in STOPPED:
        raise KeyboardInterrupt
    if code == REFUSED:
        raise UserError(said or Run(folder).error or f"{folder} was refused")
    return said if code else None


def follow(words: list[str], screen: Screen) -> tuple[int, str]:
    """Run a command line in a process that ends with this one; return its exit code and the last lines that it said.

    On a terminal the process has it, with its progress bars, and nothing is returned of what it said. At the first
    interruption the process finishes its step, saves it and ends; at the second it ends at once. It is stopped too
    where its output cannot be shown.
    """
    has_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    command = [sys.executable, "-m", "rlhf_suite.cli.child", str(os.getpid()), *words]
    settings: dict[str, Any] = {} if has_terminal else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, process_group=0, stdin=subprocess.DEVNULL, **settings)
    while True:
        try:
            for text in texts_of(process):
                screen.write(text)
            screen.write("")
            return process.wait(), screen.last_lines(SAID)  # no-limit: a run has its own limits
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
        except BaseException:  # nobody reads what it prints, such as after `| head`
            process.terminate()
            if process.stdout is not None:
                process.stdout.close()
            process.wait()  # no-limit: a run that is told to stop has a limit of its own
            raise


def texts_of(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield what a process prints, and an empty text for every POLL_S seconds in which it prints nothing."""
    if process.stdout is None:
        return
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    poller = select.poll()  # select takes no descriptor above 1023
    poller.register(process.stdout, select.POLLIN)
    while True:
        if not poller.poll(POLL_S * 1000):
            yield ""
        elif written := os.read(process.stdout.fileno(), 1 << 16):
            yield decode(written)
        else:
            return
