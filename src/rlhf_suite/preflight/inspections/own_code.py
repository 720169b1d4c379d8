"""Inspect what the user wrote for a run, and its servers of tools, by a trial: a process of its own imports the files
and starts the servers (`preflight.trial`). So a mistake in them is found before models, Ray and engines start.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from rlhf_suite.config.check.agent_file import has_tools
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.agent import agents_of
from rlhf_suite.config.declarations.flags import with_values
from rlhf_suite.config.declarations.reward import is_http
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL
from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.environment import device_kind, runtime_env
from rlhf_suite.launch.slurm import is_first_node
from rlhf_suite.preflight import trial
from rlhf_suite.preflight.inspections.rewards import remote_urls
from rlhf_suite.preflight.trial import Piece
from rlhf_suite.registry import own_names

IMPORT_S = 60.0  # what takes longer is left to the run
SERVER_S = 90.0  # more than a run allows the start of one
ENDED_S = 30.0  # for the kernel to end what was killed
TAIL = 2000  # characters of the output of a process that died


def own_code_can_be_used(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each part of the user's code that fails in a trial. Only the node that will use it tries."""
    if folder is None or not is_first_node():
        return
    pieces = [*pieces_of(run)]
    if pieces:
        yield from try_pieces(run, pieces)


def pieces_of(run: Run) -> Iterator[Piece]:
    """Yield the parts of a run's own code. Reward files come last: the limit of their memory stays."""
    for key, name, meta in with_values(run):
        if meta.algorithms is not None:
            kind = meta.algorithms.name
            yield from (Piece(key, partial(trial.algorithm, kind, own), IMPORT_S) for own in own_names(name))
    for chosen in agents_of(run.agent, run.train.agent_func_path) if run.task in RL else ():
        config, file, servers = chosen.config, chosen.file, len(chosen.config.tools)
        if config.file_part is not None and file is not None:
            yield Piece(chosen.file_flag, partial(trial.agent_file, chosen), IMPORT_S)
        has_part = config.file_part is not None and config.reads("tools")
        if has_part and (servers or (file is not None and has_tools(file))):
            key = "agent.tools" if servers else chosen.file_flag
            yield Piece(key, partial(trial.tools, chosen), IMPORT_S + servers * SERVER_S, must_end=servers > 0)
    for key, name in remote_urls(run).items():
        if not is_http(name):
            yield Piece(key, partial(trial.reward_file, str(Path(name).resolve())), IMPORT_S)


def try_pieces(run: Run, pieces: Sequence[Piece]) -> Iterator[Problem]:
    """Yield the problems of these parts, which one process tries. It and its children are gone at the end."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as report:
        command = [sys.executable, "-m", trial.__name__, str(report.fileno()), str(os.getpid())]
        environment = os.environ | runtime_env(device_kind(run.launch))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            pass_fds=[report.fileno()],
            start_new_session=True,
            env=environment,
        )
        is_late = False
        try:
            process.communicate(pickle.dumps((sys.path, pieces)), sum(piece.limit_s for piece in pieces))
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            end(process)
        entries = [json.loads(line) for line in text_of(report).splitlines()]
        for piece, problem in zip(pieces, entries, strict=False):
            if problem:
                yield Problem(piece.key, *problem)
        if len(entries) < len(pieces):
            yield from explain_unfinished(pieces[len(entries)], process, is_late, text_of(said)[-TAIL:])


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a trial, its process group, and servers that it has started, each of which has a group of its own."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDED_S)


def explain_unfinished(piece: Piece, process: subprocess.Popen[bytes], is_late: bool, said: str) -> Iterator[Problem]:
    """Yield the problem of a part in whose trial the process ended, or took too long."""
    wrote = f"; it last said: {printable(said.strip(), TAIL, keep_lines=True)}" if said.strip() else ""
    if not is_late:
        code = process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        yield Problem(piece.key, f"importing it ended the process ({how}){wrote}", "correct it")
    elif piece.must_end:
        problem = f"importing it and asking its servers took longer than {piece.limit_s:g} s{wrote}"
        yield Problem(piece.key, problem, "correct it, or start servers that take long beforehand and give their URLs")


def text_of(file: IO[bytes]) -> str:
    """Return all that was written to a file."""
    file.seek(0)
    return file.read().decode(errors="replace")
