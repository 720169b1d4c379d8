"""Every job of a command line composed and checked before the first one starts, all mistakes at once.

Choices (`experiment=grpo`) are composed, once per combination. Values (`actor.adam.lr=1e-6`) are then put in one by
one, so that each mistake is met. A sweep is expanded, and each of its jobs checked.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from rlhf_suite.cli import overrides as words
from rlhf_suite.cli.arguments import CommandLine
from rlhf_suite.cli.compose import Composed, compose_blaming, hydra_ready, presets, search_path
from rlhf_suite.cli.nodes import node_problem
from rlhf_suite.cli.overrides import Overrides
from rlhf_suite.cli.values import Value, flattened, name_problems
from rlhf_suite.config.check import check
from rlhf_suite.config.flags import kind
from rlhf_suite.config.names import flags_of
from rlhf_suite.config.problems import Problem, distinct
from rlhf_suite.config.runs import TASKS, Run
from rlhf_suite.config.validate import assign, to_run

MAX_JOBS = 500


@dataclass
class Preflight:
    """What a command line amounts to: one of `runs` per job, unless there are `problems`."""

    problems: list[Problem] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    is_sweep: bool = False
    is_job: bool = False  # of a sweep
    given: frozenset[str] = frozenset()  # keys set on the command line
    presets: dict[str, str] = field(default_factory=dict)  # of the last job, by group
    demo: str | None = None  # the preset that stands in for a command line without a model
    folder: Path = Path()  # where the run or the sweep wants to be
    chosen_folder: bool = False  # by the user


def preflight(line: CommandLine) -> Preflight:
    """Compose and check all jobs of a command line."""
    result = Preflight(problems=list(line.problems))
    with hydra_ready():
        given = words.sort([*config_folder(line, result), *line.overrides])
        result.problems += given.problems
        result.given = frozenset(each.key_or_group for each in given.values) - set(line.from_file)
        result.is_job = any(word.startswith("hydra.job.num=") for word in given.settings)
        first, _ = compose_blaming(*given.settings, *next(given.choice_sets(), []))
        result.is_sweep = "--multirun" in line.options or first.whole.hydra.mode == RunMode.MULTIRUN
        if result.is_sweep:
            given = with_sweep_params(given, first)
        else:
            result.problems += [several_values(each) for each in given.sweeps]
            given = without_sweeps(given)
        for choices in itertools.islice(given.choice_sets(), MAX_JOBS):
            check_choices(choices, given, result)
        if not result.problems:
            set_folder(first, given, result)
            nodes = OmegaConf.select(first.whole, "hydra.launcher.nodes") or 1
            key = "hydra.launcher.nodes"
            result.problems += filter(None, (node_problem(run, key, nodes, f"write {key}=1") for run in result.runs))
    result.problems = distinct(result.problems)
    return result


def config_folder(line: CommandLine, result: Preflight) -> list[str]:
    """`--config-dir` in the words of the Compose API."""
    folder = line.options.get("--config-dir")
    if folder is None:
        return []
    if not Path(folder).expanduser().is_dir():
        result.problems.append(Problem("--config-dir", f"{folder!r} is no folder", "give a folder of presets"))
        return []
    return [search_path(folder)]


def set_folder(first: Composed, given: Overrides, result: Preflight) -> None:
    """Where the run or the sweep wants to be, and whether the user says so."""
    name = "sweep" if result.is_sweep else "run"
    result.folder = Path(first.whole.hydra[name].dir).expanduser()
    result.chosen_folder = any(word.startswith(f"hydra.{name}.dir=") for word in given.settings)
    named = {run.run_dir for run in result.runs} - {None}
    if named and not result.is_job:
        folders = {str(Path(folder).expanduser()) for folder in named if folder}
        folders |= {str(result.folder)} if result.chosen_folder else set()
        if len(folders) > 1 or "" in named:
            fix = "write one run_dir=<folder>; the jobs of a sweep get folders below it"
            result.problems.append(Problem("run_dir", f"{' and '.join(sorted(folders)) or 'an empty name'}", fix))
        result.folder, result.chosen_folder = Path(folders.pop() if folders else "."), True


def with_sweep_params(given: Overrides, first: Composed) -> Overrides:
    """Add the sweep that a preset holds in hydra.sweeper.params; the command line wins over it."""
    params = OmegaConf.select(first.whole, "hydra.sweeper.params") or {}
    taken = {each.key_or_group for each in (*given.choices, *given.values)}
    extra = words.sort([f"{key}={value}" for key, value in params.items() if key not in taken])
    return replace(given, choices=[*extra.choices, *given.choices], values=[*extra.values, *given.values])


def without_sweeps(given: Overrides) -> Overrides:
    return replace(
        given,
        choices=[each for each in given.choices if not each.is_sweep_override()],
        values=[each for each in given.values if not each.is_sweep_override()],
    )


def several_values(override: Override) -> Problem:
    """Commas outside of quotes and brackets: what else could be meant depends on the flag's type."""
    key, _, value = (override.input_line or "").partition("=")
    info = flags_of(None).get(key)
    base = str if info is None else kind(info.type).base
    meant = "give one value"
    if base is list:
        meant = f"a list is '{key}=[{value}]'"
    elif base is str:
        meant = f"""write '{key}="{value.replace('"', "")}"' for one text"""
    return Problem(key, f"{value} are several values", f"{meant}; a sweep needs -m")


def check_choices(choices: list[str], given: Overrides, result: Preflight) -> None:
    """Check all jobs that share one combination of presets."""
    base, problems = compose_blaming(*given.settings, *choices)
    task = base.run.get("task")
    told_already = (each.key == "task" or each.fix.startswith("write task=") for each in (*problems, *result.problems))
    if task is None and not any(told_already):
        result.problems.append(
            Problem("task", "none is chosen", f"add {' or '.join(f'task={name}' for name in TASKS)}")
        )
    mistakes = [problem for each in given.values for problem in name_problems(each, task)]
    result.problems += [*problems, *mistakes]
    if task is None:
        return
    if demo := demo_for(base, task, given, mistakes):
        base, _ = compose_blaming(*given.settings, *choices, f"demo={demo}")
        result.demo = demo
    result.presets = dict(base.whole.hydra.runtime.choices)
    for values in itertools.islice(given.value_sets(), MAX_JOBS):
        check_job(base, values, result, with_rules=not problems)


def demo_for(base: Composed, task: str, given: Overrides, mistakes: list[Problem]) -> str | None:
    """The demo preset of a task, when neither a preset nor the command line (nor a mistake in it) names a model."""
    model = TASKS[task].MODEL
    named = any(each.key_or_group == model for each in given.values) or any(model in each.fix for each in mistakes)
    chosen = any(each.key_or_group == "demo" for each in given.choices)
    if named or chosen or OmegaConf.select(base.run, model) is not None:
        return None
    return task if task in presets("demo") else None


def check_job(base: Composed, values: list[Value], result: Preflight, with_rules: bool) -> None:
    """Put one job's values in and check the whole; what follows from a mistake already told is not told.

    Without a preset that does not compose (`with_rules` false) much would seem to be missing.
    """
    config = copy.deepcopy(base.run)
    flags = flags_of(config.task)
    mistakes = [assign(config, flags[key], value) for key, value in flattened(values, flags) if key in flags]
    run, problems = to_run(config)
    result.problems += [*filter(None, mistakes), *problems]
    if with_rules:
        # In a sweep a flag may matter to some jobs only.
        rules = check(run, () if result.is_sweep or result.is_job else result.given)
        result.problems += [each for each in rules if not told(each.key, result.problems)]
    result.runs.append(run)


def told(key: str, problems: list[Problem]) -> bool:
    """Whether a mistake with this flag, a misspelling of it or a part of this section is among the problems."""
    return any(key == each.key or key in each.fix or each.key.startswith(f"{key}.") for each in problems)
