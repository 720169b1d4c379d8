"""Inspect agents: the class of a file has its methods, `reset` gets what it needs, and the server of an environment
accepts connections. Files are not run."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.agents.isolation import container_tool
from rlhf_suite.config.check.agent_file import OPENRLHF, TRL, export_of, methods
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.agent import JAIL, ChosenAgent, agents_of
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL
from rlhf_suite.disk import resolve_home
from rlhf_suite.errors import FixableError
from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.processes import SHELL
from rlhf_suite.launch.slurm import is_first_node
from rlhf_suite.preflight.inspections.network import first_hop, unreachable
from rlhf_suite.preflight.trial import NEEDED
from rlhf_suite.python_source import SourceError, parse_file
from rlhf_suite.sandbox.command_jail import CommandJail, choose_user

GIVEN = {"self", "prompt", "label", "datasource"}  # what reset of TRL gets beside data.reward_columns
CONNECT_S, SHELL_S = 2.0, 60.0
PLAIN = re.compile(r"[\w./+-]+")  # a program without an expansion or an assignment before it
BUILT_IN = {
    "cd",
    "test",
    "exec",
    "if",
    "for",
    "while",
    "until",
    "case",
    "export",
    "set",
    "eval",
    "exit",
    "umask",
    "ulimit",
}


def agent_files_fit(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield the problems of the class in the file of each agent."""
    if run.task not in RL:
        return
    for agent in agents_of(run.agent, run.train.agent_func_path):
        if agent.config.needs("environment") and agent.file is not None:
            yield from class_problems(run, agent, agent.file)


def class_problems(run: Run, chosen: ChosenAgent, file: str) -> Iterator[Problem]:
    """Yield what a class lacks of its form. One that is derived from others may have it from these."""
    try:
        export = export_of(file)
        tree = parse_file(resolve_home(file).resolve())
    except SourceError:  # a rule says so
        return
    node = next(
        (statement for statement in tree.body if isinstance(statement, ast.ClassDef) and statement.name == export.name),
        None,
    )
    if node is None:
        return
    own = {method.name: method for method in methods(node)}
    where = f"{file}:{node.lineno}: class {node.name} ({export.form})"
    missing = [name for name in NEEDED.get(export.form, ()) if name not in own]
    if missing and not node.bases:
        yield Problem(chosen.file_flag, f"{where} has no {' and no '.join(missing)}", "define it (docs/agents.md)")
    if export.form == TRL:
        arguments = own["reset"].args
        required = [arg.arg for arg in arguments.args[: len(arguments.args) - len(arguments.defaults)]]
        absent = [name for name in required if name not in GIVEN | set(run.data.reward_columns or ())]
        if absent:
            problem = f"{file}:{own['reset'].lineno}: reset takes {', '.join(absent)}, which no row passes"
            yield Problem(chosen.file_flag, problem, f"add data.reward_columns=[{','.join(absent)}]")
    shows = any(isinstance(child, ast.Constant) and child.value == "environment_images" for child in ast.walk(node))
    if export.form == OPENRLHF and shows and run.data.image_key is None:
        problem = f"{where} answers with images, but the policy reads only text"
        yield Problem("data.image_key", problem, "add data.image_key=<column> (docs/vision.md)")


def environment_server_answers(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if nothing accepts connections at agent.server_url. Only the node that will use it asks."""
    if folder is None or not is_first_node() or run.task not in RL or run.agent.server_url is None:
        return
    url = run.agent.server_url.replace("ws", "http", 1)
    for (host, port), reason in unreachable([first_hop(url)], CONNECT_S).items():
        problem = f"the server of the environment does not accept a connection: {host}:{port}: {reason}"
        yield Problem("agent.server_url", problem, "start the server first, or correct the address")


def commands_can_run(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for a command of episodes that the shell cannot read, or whose program is not there. A relative
    path would be looked for in the folder of an episode."""
    if folder is None or not is_first_node() or run.task not in RL:
        return
    for name, command in (("command", run.agent.command), ("score_command", run.agent.score_command)):
        if command is not None:
            yield from command_problems(f"agent.{name}", command, run.agent.container in (None, JAIL))


def commands_have_their_place(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield why the commands of episodes cannot run in the container or the jail of agent.container."""
    if folder is None or not is_first_node() or run.task not in RL or run.agent.container is None:
        return
    for path in run.agent.container_paths:
        if not resolve_home(path).exists():
            yield Problem("agent.container_paths", f"there is no {path}", "correct the path")
    if run.agent.container == JAIL:
        yield from jail_problems()
    else:
        yield from image_problems(run.agent.container)


def jail_problems() -> Iterator[Problem]:
    """Yield why a command does not run in a jail of this machine."""
    with tempfile.TemporaryDirectory(prefix="rlhf_suite_") as place:
        tried = CommandJail(place, (), choose_user()).command((SHELL, "-c", "true"))
        said = subprocess.run(tried, capture_output=True, text=True, timeout=SHELL_S, check=False)
    if said.returncode:
        reason = printable(said.stderr.strip(), 200) or f"exit code {said.returncode}"
        fix = "allow namespaces to users of this machine, or write an image in agent.container"
        yield Problem("agent.container", f"agent.container={JAIL}: {reason}", fix)


def image_problems(image: str) -> Iterator[Problem]:
    """Yield why containers of an image cannot be started: no program can run them, or it has no such image."""
    try:
        tool = container_tool()
    except FixableError as error:
        yield Problem("agent.container", error.what, error.fix)
        return
    try:
        said = subprocess.run(
            [tool, "image", "inspect", image], capture_output=True, text=True, timeout=SHELL_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield Problem("agent.container", f"{tool} does not answer within {SHELL_S:g} s", f"look at {tool} info")
        return
    if said.returncode:
        reason = printable(said.stderr.strip(), 200)
        yield Problem("agent.container", f"{tool} has no image {image}: {reason}", f"run {tool} pull {image} first")


def command_problems(key: str, command: str, is_of_machine: bool) -> Iterator[Problem]:
    """Yield why a command of the shell cannot run, as far as its first word tells. `is_of_machine`: it names a program
    of this machine, and not of an image."""
    checked = [SHELL, "-n", "-c", command]
    said = subprocess.run(checked, capture_output=True, text=True, timeout=SHELL_S, check=False)
    if said.returncode:
        yield Problem(key, f"the shell cannot read it: {printable(said.stderr.strip(), 200)}", "correct the command")
        return
    program = next(iter(command.split()), "")
    if not program:
        yield Problem(key, "it is empty", "write a command, or remove it")
    elif not PLAIN.fullmatch(program) or program in BUILT_IN:
        return
    elif "/" in program and not program.startswith("/"):
        problem = f"{program} would be searched in the folder of each episode"
        yield Problem(key, problem, f"write {Path(program).resolve()}, or $AGENT_START/{program}")
    elif is_of_machine and shutil.which(program) is None:
        yield Problem(key, f"there is no program {program}", "install it, or write its whole path")


AGENTS = (agent_files_fit, environment_server_answers, commands_can_run, commands_have_their_place)
