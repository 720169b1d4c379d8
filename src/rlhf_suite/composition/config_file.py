"""`--config <file>`: a YAML file as the beginning of a command line, a run's own `config.yaml` or one written by hand.

The file holds flags, nested or dotted, and choices of presets: `task: ppo`, `ds: zero3`, `actor: {adam: {lr: 1e-6}}`.
Its values win over the presets that it chooses. The command line wins over the file, with its flags and with the
presets that it chooses. With `scale=tiny` on the command line, a file tiny.yaml beside it wins over the scale: it holds
what this run needs besides, such as a reward model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_suite.composition.arguments import CommandLine, key_of
from rlhf_suite.composition.compose import add_to_search_path, guess_task, hydra_ready, list_sources, search_path
from rlhf_suite.composition.overrides import Overrides, flatten
from rlhf_suite.composition.presets import SCALE, group_names, names_in
from rlhf_suite.config.check.formatting import quote
from rlhf_suite.config.check.names import constants_of
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.check.references import guard_environment, make_unresolved_problem
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.disk import resolve_home
from rlhf_suite.foreign_files import DamagedFile, read_yaml
from rlhf_suite.run_folders.record import PLAN

OPTION = "--config"
# What belongs to the run that wrote the file, not to a new one.
OF_ONE_RUN = ("explain", "ckpt.load_enable", "run_dir")


def with_config_file(line: CommandLine) -> CommandLine:
    """Return the command line with the words of its `--config` file before its own; without the option, as it is."""
    name = line.options.get(OPTION)
    if name is None:
        return line
    path = resolve_home(name)
    content = read(path)
    if isinstance(content, Problem):
        line.problems.append(content)
        return line
    choices = choices_of(line)
    scales = [choice for choice in choices if key_of(choice) == SCALE]
    given = {key_of(word) for word in line.overrides}
    given |= presets_keys(line, [choice for choice in choices if choice not in scales], content)
    beside = [file for scale in scales if (file := path.with_name(f"{scale.partition('=')[2]}.yaml")).is_file()]
    line.from_file, words = {}, list[str]()
    for file in [*beside, path]:  # the one that wins first
        table = content if file == path else read(file)
        if isinstance(table, Problem):
            line.problems.append(table)
            continue
        given |= presets_keys(line, scales, content) if file == path else set()
        chosen = [word for word in words_of(table, content.get("task")) if key_of(word) not in given]
        line.from_file |= {key_of(word): str(file) for word in chosen}
        given |= {key_of(word) for word in chosen}
        words = [*chosen, *words]
    line.overrides = [*words, *line.overrides]
    return line


def choices_of(line: CommandLine) -> list[str]:
    """Return each preset that the command line chooses, as a word of its own."""
    groups = [word.partition("=") for word in line.overrides]
    return [f"{group}={name}" for group, _, choice in groups if group in group_names() for name in names_in(choice)]


def presets_keys(line: CommandLine, choices: list[str], content: dict[str, Any]) -> set[str]:
    """Return the keys that presets of the command line set. A scale is that of the task, which the file may choose."""
    if not choices:
        return set()
    folder = line.options.get("--config-dir")
    added, folders = ([add_to_search_path(folder)], [search_path(folder)]) if folder else ([], [])
    chosen = [*choices_of(line), *(f"{group}={name}" for group, name in content.items() if group in group_names())]
    task, _ = guess_task(chosen, Overrides(own_presets=line.own_presets))
    of_task = [f"task={task}"] if task else []
    with hydra_ready():
        sources = [
            source
            for choice in choices
            for source in list_sources([*added, *(of_task if key_of(choice) == SCALE else []), choice], folders)
        ]
    return set().union(*(source.keys for source in sources))


def read(path: Path) -> dict[str, Any] | Problem:
    """Return the file's content, or say why it cannot be used."""
    fix = "give a YAML file of flags, for example the config.yaml of a run folder"
    try:
        loaded = read_yaml(path, follow=True)
        content = OmegaConf.to_container(loaded)  # references are those of the run's flags, as on the command line
        if not isinstance(loaded, DictConfig) or not isinstance(content, dict):
            return Problem(OPTION, f"{path} does not hold a table of flags", fix)
        with guard_environment():
            content |= {key: loaded[key] for key in loaded if key in group_names() and isinstance(content[key], str)}
    except DamagedFile as damage:
        return Problem(OPTION, str(damage), fix)
    except OmegaConfBaseException as error:
        unresolvable = make_unresolved_problem(OPTION, error, fix)
        return replace(unresolvable, what=f"{path}: {unresolvable.what}")
    return {str(key): value for key, value in content.items() if key != PLAN}


def words_of(content: dict[str, Any], task: object) -> Iterator[str]:
    """Return the overrides that say the same as a file for a task."""
    flags = flags_of(task if task in TASKS else None)
    constants = constants_of(task) if task in TASKS else {}
    for key, value in flatten(content.items(), flags):
        if key in constants and value == constants[key]:  # a run writes these too
            continue
        if key not in OF_ONE_RUN and not (key in group_names() and value is None):
            yield f"{key}={value if key in group_names() else spell(value, quote)}"
