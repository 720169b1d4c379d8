"""Hydra's composition of conf/ and the dataclasses, with its errors turned into problems."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from rlhf_suite.composition.arguments import CommandLine
from rlhf_suite.composition.overrides import Overrides, name_problems
from rlhf_suite.composition.presets import (
    BEFORE_EXPERIMENT,
    CHOICES,
    SCALE,
    SCALES,
    generate_presets,
    group_names,
    may_set,
    names_in,
    order,
    preset_names,
    task_of,
)
from rlhf_suite.composition.scales import scales_of
from rlhf_suite.config import conf_dir
from rlhf_suite.config.check.formatting import did_you_mean
from rlhf_suite.config.check.old_names import translate_value as elsewhere
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.check.references import guard_environment
from rlhf_suite.config.declarations.flags import flat
from rlhf_suite.config.declarations.launchers import LAUNCHERS, PREFIX
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.disk import resolve_home
from rlhf_suite.errors import UserError
from rlhf_suite.run_folders.record import schema

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError)
PROVIDER = "rlhf_suite"
MENU = "config"  # conf/config.yaml
REORDERED = "menu"  # the same in another order
NAMES_A_MODEL = ("model_name_or_path", "prompt_dataset", "dataset")


class Shared(dict[str, Any]):
    """A part of Hydra's store that is not copied with the store, as every composition does: Hydra copies a node again
    before it uses it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


class Tasks(Shared):
    """The presets of the group `task` in Hydra's store: the dataclasses of each task, made when they are asked for. To
    make all of them takes long."""

    def keys(self) -> Any:
        """Return the names of all tasks, as files."""
        return {f"{task}.yaml": None for task in TASKS}.keys()

    def __contains__(self, file: object) -> bool:
        return str(file).removesuffix(".yaml") in TASKS

    def __missing__(self, file: str) -> ConfigNode:
        node = schema(file.removesuffix(".yaml"))
        self[file] = ConfigNode(name=file, node=node, group="task", package="_global_", provider=PROVIDER)
        return self[file]


@cache
def register() -> None:
    """Give Hydra each task's dataclasses, the settings of launchers, and the generated presets."""
    store = ConfigStore.instance()
    store.repo = Shared(store.repo)
    store.repo["task"] = Tasks()
    for name, settings in LAUNCHERS.items():
        store.store(group="hydra/launcher", name=name, node=settings, provider=PROVIDER)
    for group in CHOICES:
        for name, values in generate_presets(group).items():
            store.store(group=group, name=name, node=values, provider=PROVIDER)


@contextmanager
def hydra_ready() -> Iterator[None]:
    """Start Hydra's Compose API over conf/ for the block.

    Raises:
        UserError: the current folder of this process was deleted.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder was deleted; change to a folder that exists, such as with: cd ~") from None
    register()
    with guard_environment(), initialize_config_dir(version_base="1.3", config_dir=str(conf_dir()), job_name="run"):
        yield


def menu(chosen: Collection[str]) -> str:
    """Return the name of the menu for a command line that chooses presets of some groups (see conf/config.yaml)."""
    if "experiment" not in chosen or set(chosen) <= {*BEFORE_EXPERIMENT}:
        return MENU
    content = OmegaConf.load(conf_dir() / f"{MENU}.yaml")
    groups = {name: entry for entry in content.defaults if isinstance(entry, DictConfig) for name in entry}
    others = [entry for entry in content.defaults if entry not in [groups[name] for name in group_names()]]
    content.defaults = [*(groups[group] for group in order(chosen)), *others]
    ConfigStore.instance().store(name=REORDERED, node=content, provider=PROVIDER)
    return REORDERED


def compose_overrides(overrides: list[str]) -> DictConfig:
    """Return the run with choices of presets, and Hydra's own settings under `hydra`."""
    store_scales(overrides)
    return compose(menu(groups_of(overrides)), overrides=overrides, return_hydra_config=True)


def groups_of(overrides: Iterable[str]) -> set[str]:
    """Return what overrides set: groups of presets, and flags."""
    return {word.partition("=")[0] for word in overrides}


def store_scales(overrides: Iterable[str]) -> None:
    """Give Hydra the presets of the group `scale` for the task that the other choices of presets come to."""
    if SCALE not in groups_of(overrides):
        return
    others = [word for word in overrides if not word.startswith(f"{SCALE}=")]
    task = compose(menu(groups_of(others)), overrides=others).get("task")
    store = ConfigStore.instance()
    store.repo[SCALE] = Shared()
    for name, values in scales_of(task).items():
        store.store(group=SCALE, name=name, node=make_tree(values), package="_global_", provider=PROVIDER)


def make_tree(values: Mapping[str, Any]) -> DictConfig:
    """Return values by their dotted keys as a tree."""
    tree = OmegaConf.create()
    for key, value in values.items():
        OmegaConf.update(tree, key, value)
    return tree


def search_path(folder: str) -> str:
    """Return the folder of `--config-dir` as an entry of hydra.searchpath."""
    return f"file://{resolve_home(folder).resolve()}"


def add_to_search_path(folder: str) -> str:
    """Return the override that adds a folder to the Compose API."""
    return f'hydra.searchpath=["{search_path(folder)}"]'


@dataclass(frozen=True)
class Source:
    """A preset that a run is composed of, as `<group>/<name>.yaml`, and the dotted keys that it sets."""

    name: str
    keys: frozenset[str]


def list_sources(overrides: list[str], folders: Iterable[str] = ()) -> list[Source]:
    """Return the presets that choices are composed of, the one that wins first, by Hydra's own defaults list: with
    presets that presets choose, at the place and below the package that they have there. Choices that do not compose
    have none. `folders` are those of the user's presets, as in hydra.searchpath."""
    loader = GlobalHydra.instance().config_loader()
    try:
        store_scales(overrides)
        composed = loader.compute_defaults_list(menu(groups_of(overrides)), overrides, RunMode.RUN).defaults
    except COMPOSE_ERRORS:
        return []
    paths = deepcopy(loader.get_search_path())
    for folder in folders:
        paths.append("hydra.searchpath", folder)
    presets = ConfigRepository(paths)
    sources = (read_source(presets, entry) for entry in reversed(composed))
    return [source for source in sources if source is not None]


def read_source(presets: ConfigRepository, entry: ResultDefault) -> Source | None:
    """Return one entry of a defaults list with the keys that it sets; None for the menu, schemas and Hydra's own."""
    path = entry.config_path or ""
    if entry.primary or path.partition("/")[0] in ("hydra", "task"):
        return None
    loaded = presets.load_config(path)
    if loaded is None:
        return None
    content = OmegaConf.to_container(loaded.config)
    values = {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    values.pop("defaults", None)
    prefix = f"{entry.package}." if entry.package else ""
    suffix = "" if loaded.provider == PROVIDER else ".yaml"
    return Source(f"{path}{suffix}", frozenset(f"{prefix}{key}" for key in flat(values)))


def compose_blaming(*overrides: str) -> tuple[DictConfig, list[Problem]]:
    """Compose; words that do not compose with those before them are left out, each as a problem."""
    config = attempt(*overrides)
    if isinstance(config, DictConfig):
        return config, []
    good: list[str] = []
    problems = []
    task = None
    for word in overrides:
        config = attempt(*good, word)
        if isinstance(config, DictConfig):
            task = config.get("task")
            good.append(word)
        else:
            problems.append(blame(word, config, task))
    config = attempt(*good)
    assert isinstance(config, DictConfig), config
    return config, problems


def attempt(*overrides: str) -> DictConfig | Exception:
    """Return a new copy of what overrides compose to, or Hydra's error why they do not."""
    composed = compose_once(*overrides)
    return pickle.loads(composed) if isinstance(composed, bytes) else composed


@cache
def compose_once(*overrides: str) -> bytes | Exception:
    """Return what `attempt` does, composed once and pickled: a new object from it takes a sixth of the time of a deep
    copy."""
    try:
        return pickle.dumps(compose_overrides(list(overrides)))
    except COMPOSE_ERRORS as error:
        return error


def blame(word: str, error: Exception, task: str | None) -> Problem:
    """Return the problem of one word that does not compose: no such preset, or one that does not fit the task."""
    key, _, value = word.lstrip("+~").partition("=")
    if key == SCALE and value in SCALES and task is not None:
        problem = f"{value} does not fit this task: task={task} has no demo, whose model and rows it would have"
        return Problem(key, problem, f"remove {word}")
    missing = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
    if missing and missing.startswith(f"{key}/"):
        return no_such_preset(key, missing.removeprefix(f"{key}/"), task)
    reason = str(error)
    if key in group_names() and type(error) is ValueError:  # Hydra's own, for a choice that is not a word
        return no_such_preset(key, value, task)
    if key not in group_names():
        help_of = f"see --help {PREFIX}" if key.startswith(PREFIX) else "see --info config and --cfg hydra"
        return Problem(key, one_line(reason), help_of)
    section = key.replace("/", ".")
    owners = [name for name in TASKS if any(flag.startswith(f"{section}.") for flag in flags_of(name))]
    if owners and task not in (None, *owners):
        where = " or ".join(f"task={name}" for name in owners)
        problem = f"{value} does not fit this task: task={task} has no section {section}"
        return Problem(key, problem, f"remove {word}; the section belongs to {where}")
    why = one_line(reason)
    if owners and (flag := find_unknown_key(error)):
        why = f"it sets {flag}, and {section} of task={task} has no such flag"
    return Problem(key, f"{value} does not fit this task: {why}", f"remove {word}, or change task=")


def find_unknown_key(error: BaseException | None) -> str | None:
    """Return the name that a section does not have, by OmegaConf's error from which Hydra made its own."""
    while error is not None and not isinstance(error, ConfigKeyError | ConfigAttributeError):
        error = error.__context__
    return None if error is None else str(error.key)


def no_such_preset(key: str, value: str, task: str | None) -> Problem:
    """Return the problem of a choice that names no preset: the flag that was meant, or the nearest presets."""
    options = [name for name in GlobalHydra.instance().config_loader().get_group_options(key) if name != "config"]
    flags = {name: info for name, info in flags_of(task).items() if name.startswith(f"{key.replace('/', '.')}.")}
    meant = next((name for name, info in flags.items() if value in map(str, info.meta.choices or ())), None)
    close = did_you_mean(value.lower(), options, f"{key}=")
    if key == "hydra/sweeper":
        fix = f"install it, such as hydra-{value}-sweeper, or remove {key}: basic, the default, tries all of them"
        return Problem(key, f"there is no sweeper {value} among the installed ones", fix)
    other = elsewhere(CHOICES[key][0], value) if key in CHOICES else None
    if other:
        fix = f"write {key}={other}"
    elif algorithm := word_of_algorithm(key, value):
        fix = f"write {algorithm}"
    elif meant:
        fix = f"did you mean {meant}={value}?"
    elif close:
        fix = close
    else:
        fix = f"choose {key}={' or '.join(options)}"
    named = next((f"{key}.{name}" for name in NAMES_A_MODEL if f"{key}.{name}" in flags), None)
    if named and not meant:
        fix += f"; for a {'model' if named.endswith('path') else 'data set'} write {named}={value}"
    problem = f"there is no task {value}" if key == "task" else f"there is no preset {key}/{value}"
    return Problem(key, problem, fix, tuple(filter(None, (meant or named,))), "name")


def word_of_algorithm(key: str, value: str) -> str | None:
    """Return what chooses the algorithm that was taken for a task, as in `task=grpo` and `task=ipo`, or the task that
    was taken for an experiment; None for other names."""
    name = value.lower().replace("-", "_")
    if key == "experiment":
        return f"task={name}" if name in TASKS else None
    if key != "task":
        return None
    if name in preset_names("experiment"):
        return f"experiment={name}"
    for task in TRAINED:
        for info in flags_of(task).values():
            if info.meta.algorithms is not None and name in (info.meta.choices or ()):
                return f"task={task} {info.key}={name}"
    return None


def one_line(reason: str) -> str:
    """Return the first sentences of one of Hydra's errors."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if lines[0].endswith("composing config:"):  # names a file, and the fault only in the next line
        return lines[1]
    return " ".join(lines[:2]) if lines[0].endswith(".") else lines[0]


class Composed(NamedTuple):
    """A combination of presets: its configuration, words that do not compose, and the demo that is a part of it."""

    config: DictConfig
    problems: list[Problem]
    demo: str | None


def compose_job(choices: list[str], given: Overrides) -> Composed:
    """Compose a combination of presets. With the demo of its task when neither a preset nor the command line names a
    model; that is mostly plain before the composition, and one composition is enough."""
    plain = (*given.settings, *choices)
    task, names_no_model = guess_task(choices, given)
    if task is not None and wants_demo(task, given) and names_no_model:
        base, problems = compose_blaming(*plain, f"demo={task}")
        if not problems and base.task == task:
            return Composed(base, [], task)
    base, problems = compose_blaming(*plain)
    task = base.get("task")
    if task is None or not wants_demo(task, given) or OmegaConf.select(base, TASKS[task].model) is not None:
        return Composed(base, problems, None)
    return Composed(compose_blaming(*plain, f"demo={task}")[0], problems, task)


def guess_task(choices: list[str], given: Overrides) -> tuple[str | None, bool]:
    """Return the task that presets choose, and whether none of them can name a model, as far as their text tells."""
    own = given.own_presets
    named = [(group, name) for group, choice in pairs(choices) for name in names_in(choice)]
    tasks = [name if group == "task" else task_of(group, name, own) for group, name in named]
    task = next((name for name in tasks if name in TASKS), None)
    others = [(group, name) for group, name in named if group != "task"]
    return task, task is not None and not any(may_set(*other, TASKS[task].model, own) for other in others)


def pairs(choices: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the group and the choice of each word."""
    for word in choices:
        group, _, choice = word.partition("=")
        yield group.lstrip("+").partition("@")[0], choice


def wants_demo(task: str, given: Overrides) -> bool:
    """Return whether the command line names no model (nor a mistake in it), and there is a demo to stand in for it."""
    model = TASKS[task].model
    is_named = any(value.key_or_group == model for value in given.values)
    is_misspelt = any(model in problem.meant for problem in mistaken_names(task, given))
    return not (is_named or is_misspelt or "demo" in given.chosen) and task in preset_names("demo")


def mistaken_names(task: str | None, given: Overrides) -> list[Problem]:
    """Return the problems of the keys on the command line."""
    return [problem for value in given.values for problem in name_problems(value, task)]


def find_hidden_presets(line: CommandLine) -> list[Problem]:
    """Return a problem for each chosen preset of the user's that has the name of one of the suite's, which wins."""
    problems = []
    for word in line.overrides if line.own_presets else ():
        group, _, choice = word.partition("=")
        for name in names_in(choice) if group in group_names() else ():
            own = Path(line.own_presets or "") / group / f"{name}.yaml"
            if name in preset_names(group) and own.is_file():
                problem = f"{own} has the name of a preset of the suite"
                problems.append(Problem(group, problem, f"rename it: {', '.join(preset_names(group))} are taken"))
    return problems
