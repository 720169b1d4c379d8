"""Every job of a command line composed and checked before the first one starts, all mistakes at once.

Choices (`experiment=grpo`) are composed, once per combination. Values (`actor.adam.lr=1e-6`) are then put in one by
one, so that each mistake is met. A sweep is expanded, and each of its jobs checked. What is checked here is what runs:
a plain run is not composed again.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, cast

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import InterpolationResolutionError

from rlhf_suite.composition import compose, overrides
from rlhf_suite.composition.arguments import CommandLine
from rlhf_suite.composition.overrides import Overrides, Value, flatten
from rlhf_suite.composition.presets import BEFORE_EXPERIMENT
from rlhf_suite.config.check.problems import Problem, distinct
from rlhf_suite.config.check.references import make_unresolved_problem
from rlhf_suite.config.check.validate import assign, launcher_problems, leaves, to_run
from rlhf_suite.config.declarations.launchers import LAUNCHERS
from rlhf_suite.config.declarations.runs import TASKS, Run, flags_of
from rlhf_suite.config.declarations.task_groups import LOOPS, PLANNED
from rlhf_suite.config.plan.run_plan import is_on_ray, roles
from rlhf_suite.config.rules.check_run import check
from rlhf_suite.disk import resolve_home
from rlhf_suite.launch.environment import cluster_to_join
from rlhf_suite.preflight.inspections.named_files import inspect_named


@dataclass
class Preflight:
    """What a command line amounts to: one of `runs` per job, unless there are `problems`."""

    problems: list[Problem] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    jobs: list[tuple[list[str], str]] = field(default_factory=list)  # the words of each, its folder in the sweep's
    is_sweep: bool = False
    is_job: bool = False  # of a sweep, or of Slurm
    is_submitted: bool = False  # a single run, as a job of Slurm
    given: frozenset[str] = frozenset()  # keys set on the command line
    composed_of: list[str] = field(default_factory=list)  # the first job's choices of presets, as words for Hydra
    notes: list[str] = field(default_factory=list)  # what a run says before it begins
    adopted: set[str] = field(default_factory=set)  # flags that a run takes from the folder of its model
    demo: str | None = None  # the preset that stands in for a command line without a model
    # The last job as Hydra shows it, interpolations and all, and its settings of Hydra.
    config: DictConfig = field(default_factory=partial(DictConfig, {}))
    hydra: DictConfig = field(default_factory=partial(DictConfig, {}))
    folder: Path = Path()  # where the run or the sweep wants to be
    chosen_folder: bool = False  # by the user

    @property
    def first_of_several(self) -> str:
        """What to say beside an answer about the first run of a sweep; empty for a single run."""
        return f"This is the first of {len(self.runs)} jobs." if len(self.runs) > 1 else ""


def preflight(line: CommandLine) -> Preflight:
    """Compose and check all jobs of a command line."""
    try:
        return all_jobs(line)
    except InterpolationResolutionError as error:  # of a setting of Hydra; those of flags are met one by one
        return Preflight(
            problems=[make_unresolved_problem(str(error.full_key or "hydra"), error, "correct the reference")]
        )


def all_jobs(line: CommandLine) -> Preflight:
    """Compose all jobs of a command line, with their problems."""
    if hidden := compose.find_hidden_presets(line):
        return Preflight(problems=hidden)
    result = Preflight(problems=list(line.problems))
    with compose.hydra_ready():
        given = overrides.sort([*config_folder(line, result), *line.overrides], line.own_presets)
        result.problems += given.problems
        result.given = frozenset(value.key_or_group for value in given.values) - set(line.from_file)
        result.is_job = any(word.startswith("hydra.job.num=") for word in given.settings)
        first = compose.compose_job(next(given.choice_sets(), []), given)
        settings = first.config.hydra
        result.is_sweep = "--multirun" in line.options or settings.mode == RunMode.MULTIRUN
        result.is_submitted = on_slurm(settings) and not (result.is_sweep or result.is_job)
        result.problems += settings_problems(settings, result)
        is_one_job = not (result.is_sweep or given.sweeps)
        if result.is_sweep:
            given = overrides.with_sweep_params(given, settings)
            result.problems += overrides.list_empty(given)
            if settings.runtime.choices["hydra/sweeper"] == "basic":
                result.problems += [overrides.endless(sweep) for sweep in given.sweeps if not sweep.is_discrete_sweep()]
        else:
            result.problems += [overrides.several_values(sweep) for sweep in given.sweeps]
            given = overrides.without_sweeps(given)
        for choices in given.choice_sets():
            check_choices(choices, first if is_one_job else compose.compose_job(choices, given), given, result)
        if not result.problems:
            set_folder(settings if result.is_sweep else result.hydra, given, result)
            result.problems += find_shared_folders(result)
            nodes = OmegaConf.select(settings, "launcher.nodes") or 1
            key = "hydra.launcher.nodes"
            result.problems += filter(None, (node_problem(run, key, nodes, f"write {key}=1") for run in result.runs))
            if on_slurm(settings) and not result.is_job:
                result.problems += filter(None, (too_few_nodes(run, nodes) for run in result.runs))
    result.problems = distinct(result.problems)
    return result


def config_folder(line: CommandLine, result: Preflight) -> list[str]:
    """Return `--config-dir` in the words of the Compose API."""
    folder = line.options.get("--config-dir")
    if folder is None:
        return []
    if not resolve_home(folder).is_dir():
        result.problems.append(Problem("--config-dir", f"{folder!r} is not a folder", "give a folder of presets"))
        return []
    return [compose.add_to_search_path(folder)]


def on_slurm(hydra: DictConfig) -> bool:
    """Return whether Slurm starts what the command line asks for."""
    return bool(hydra.runtime.choices["hydra/launcher"] == "slurm")


def settings_problems(hydra: DictConfig, checked: Preflight) -> list[Problem]:
    """Return a problem for each setting of Hydra that a run or a sweep does not follow."""
    problems, is_sweep = list[Problem](), checked.is_sweep
    launcher, sweeper = (hydra.runtime.choices[f"hydra/{name}"] for name in ("launcher", "sweeper"))
    if (is_sweep and launcher in LAUNCHERS) or checked.is_submitted:
        values = cast(dict[str, Any], OmegaConf.to_container(hydra.launcher, resolve=True))
        problems += launcher_problems(launcher, values)
    elif is_sweep:
        problem = f"{launcher} does not start the jobs of a sweep here"
        problems.append(Problem("hydra/launcher", problem, f"write hydra/launcher={' or '.join(LAUNCHERS)}"))
    if is_sweep and sweeper != "basic" and launcher != "local":
        problem = f"{sweeper} waits for the jobs that it has chosen, which are processes of this machine"
        problems.append(Problem("hydra/launcher", problem, "write hydra/launcher=local, or hydra/sweeper=basic"))
    dict(hydra.job.env_set)  # resolved, which a run would find out late
    if hydra.job.chdir:
        problem = "a run does not change its working folder, and writes to its own run folder"
        problems.append(Problem("hydra.job.chdir", problem, "remove it; run_dir=<folder> says where the run writes"))
    if hydra.callbacks:
        problems.append(Problem("hydra.callbacks", "a run calls no callbacks of Hydra", "remove it"))
    return problems


def set_folder(hydra: DictConfig, given: Overrides, result: Preflight) -> None:
    """Set where the run or the sweep wants to be, and whether the user says so."""
    name = "sweep" if result.is_sweep else "run"
    if not str(hydra[name].dir):
        problem, fix = "an empty name would be the current folder", "write run_dir=<folder>"
        result.problems.append(Problem(f"hydra.{name}.dir", problem, fix))
    result.folder = resolve_home(hydra[name].dir)
    result.chosen_folder = any(word.startswith(f"hydra.{name}.dir=") for word in given.settings)
    named = {run.run_dir for run in result.runs} - {None}
    if named and not result.is_job:
        folders = {str(resolve_home(folder)) for folder in named if folder}
        folders |= {str(result.folder)} if result.chosen_folder else set()
        if len(folders) > 1 or "" in named:
            fix = "write one run_dir=<folder>; the jobs of a sweep get folders below it"
            result.problems.append(Problem("run_dir", f"{' and '.join(sorted(folders)) or 'an empty name'}", fix))
        result.folder, result.chosen_folder = Path(folders.pop() if folders else "."), True


def find_shared_folders(result: Preflight) -> Iterator[Problem]:
    """Yield a problem if jobs of a sweep would have one folder."""
    folders = Counter(str(PurePath(subfolder)) for _, subfolder in result.jobs)
    subfolder, jobs = max(folders.items(), key=lambda pair: pair[1])
    if result.is_sweep and jobs > 1:
        problem, fix = (
            f"{jobs} jobs of the sweep would have the folder {subfolder}",
            "write a name with ${hydra.job.num}",
        )
        yield Problem("hydra.sweep.subdir", problem, fix)


def check_choices(choices: list[str], composed: compose.Composed, given: Overrides, result: Preflight) -> None:
    """Check all jobs that share one combination of presets. The configuration of a single job is used up by it."""
    base, problems, demo = composed
    task = base.get("task")
    already_reported = (
        problem.key in BEFORE_EXPERIMENT or "task" in problem.meant for problem in (*problems, *result.problems)
    )
    if task is None and not any(already_reported):
        fix = f"add {' or '.join(f'task={name}' for name in TASKS)}"
        result.problems.append(Problem("task", "none is chosen", fix))
    result.problems += [*problems, *compose.mistaken_names(task, given)]
    if task is None:
        return
    result.demo = demo or result.demo
    if not result.runs:
        result.composed_of = [*given.settings, *choices, *([f"demo={demo}"] if demo else [])]
    copied = pickle.dumps(base) if result.is_sweep else b""  # a deep copy takes six times as long
    for values in given.value_sets():
        config = pickle.loads(copied) if result.is_sweep else base
        check_job(config, [*choices, *values], values, result, with_rules=not problems)


def check_job(
    config: DictConfig, words: list[str], values: dict[str, Value], result: Preflight, with_rules: bool
) -> None:
    """Put one job's values in and check the whole. A problem is reported once: rules skip flags that have one.

    Without a preset that does not compose (`with_rules` false) much would seem to be missing.
    """
    flags = flags_of(config.task)
    mistakes = [assign(config, flags[key], value) for key, value in flatten(values.values(), flags) if key in flags]
    result.jobs.append((words, split_off_hydra(config, words, result)))
    run, problems = to_run(result.config)
    result.problems += [*filter(None, mistakes), *problems]
    if not result.problems:
        run = with_trained_prompts(run, {key for key, _ in flatten(values.values(), flags)}, result)
    if with_rules:
        # In a sweep a flag may matter to some jobs only.
        rules = check(run, () if result.is_sweep or result.is_job else result.given)
        result.problems += [rule for rule in rules if not is_reported(rule.key, result.problems)]
        files = inspect_named(run)
        result.problems += [file for file in files if not is_reported(file.key, result.problems)]
    if not result.problems:
        from rlhf_suite.preflight.inspections.routing import hint_of_routes

        result.notes += [note for note in hint_of_routes(run) if note not in result.notes]
    result.runs.append(run)


def with_trained_prompts(run: Run, given: set[str], result: Preflight) -> Run:
    """Return the run with the prompts that its model was trained on, where nobody has chosen others."""
    from rlhf_suite.preflight.trained_prompts import adopt_training_prompts

    adopted = adopt_training_prompts(run, given)
    for key, value in adopted.values.items():
        OmegaConf.update(result.config, key, value)
    result.adopted |= {*adopted.values}
    result.notes += [note for note in adopted.notes if note not in result.notes]
    result.problems += adopted.problems
    return adopted.run


def split_off_hydra(config: DictConfig, words: list[str], result: Preflight) -> str:
    """Split a job's configuration into the run's and Hydra's, with the values that the run takes from Hydra's. Return
    the folder that the job gets within that of its sweep."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.override_dirname = ",".join(sorted(words))
        if OmegaConf.is_missing(config.hydra.job, "num"):
            config.hydra.job.num = len(result.runs)
            config.hydra.job.id = str(len(result.runs))
    OmegaConf.set_readonly(config.hydra, True)
    # For ${hydra:job.num}. `set_config` would copy all of these settings.
    HydraConfig.instance().cfg = cast(HydraConf, SimpleNamespace(hydra=config.hydra))
    subfolder = str(config.hydra.sweep.subdir)
    with open_dict(config):
        for key, node in [*leaves(config, {"hydra"})]:
            if isinstance(node._value(), str) and "${hydra." in node._value():
                OmegaConf.update(config, key, OmegaConf.select(config, key))
        result.hydra = config.pop("hydra")  # still resolves what it takes from the run
    result.config = config
    return subfolder


def is_reported(key: str, problems: list[Problem]) -> bool:
    """Return whether a mistake with this flag, a misspelling of it or a part of this section is among the problems."""
    return any(key in (problem.key, *problem.meant) or problem.key.startswith(f"{key}.") for problem in problems)


def node_problem(run: Run, key: str, num_nodes: int, fix: str) -> Problem | None:
    """Return what is wrong with `num_nodes` nodes for `run`; `key` gave them, `fix` takes one instead."""
    if num_nodes == 1 or is_on_ray(run):
        return None
    if run.task in LOOPS:
        problem = f"{num_nodes} nodes, but each stage of task={run.task} is a process of its own on the first one"
        fix = f"{fix}; or run the stages one by one, each a job that may have several nodes (docs/loops.md)"
        return Problem(key, problem, fix)
    return Problem(key, f"{num_nodes} nodes, but this run is one process, so the other nodes would be idle", fix)


def too_few_nodes(run: Run, num_nodes: int) -> Problem | None:
    """Return the problem of a model that wants more nodes than the run has; those of a joined cluster are not known."""
    if run.task not in PLANNED or cluster_to_join(run.launch) is not None:
        return None
    most = max(roles(run), key=lambda role: role.num_nodes or 1, default=None)
    if most is None or (most.num_nodes or 1) <= num_nodes:
        return None
    name, problem = most.name, f"{most.num_nodes} nodes, but the run has {num_nodes}"
    fix = f"use hydra/launcher=slurm hydra.launcher.nodes={most.num_nodes}, or join a cluster with launch.ray_address, "
    fix += f"or write {name}.num_nodes={num_nodes} {name}.num_gpus_per_node={most.num_actors // num_nodes}"
    return Problem(f"{name}.num_nodes", problem, fix)
