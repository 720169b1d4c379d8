"""The groups of presets: which there are, what each preset sets, and in which order they are composed; without Hydra.

A preset is a file of conf/<group>/ or of the same folder below `--config-dir`. The groups of `CHOICES` have more: one
preset for each value of a flag, so that a new estimator is a preset too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlhf_suite.config import conf_dir
from rlhf_suite.config.declarations.runs import TASKS
from rlhf_suite.registry import Kind, estimator, reward_rule

# Group -> the flag whose choices are presets, the algorithms that it names, and what else such a preset sets.
CHOICES: dict[str, tuple[str, Kind, dict[str, Any]]] = {
    "algo/advantage": ("algo.advantage.estimator", estimator, {}),
    "reward": ("reward.rule", reward_rule, {"remote_url": None, "rubric": None, "model_name_or_path": None}),
}
SCALE, SCALES = "scale", ("tiny",)  # presets that are made for the task of a run: composition/scales.py
TASK = "override /task"  # the entry of a defaults list by which a preset chooses its task
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Groups that stay before the experiment, whoever chooses them.
BEFORE_EXPERIMENT = ("task", "demo", "experiment")


@cache
def group_names() -> tuple[str, ...]:
    """Return the groups of presets in the order in which they are composed: those of the menu, conf/config.yaml."""
    _, menu = read_preset(conf_dir() / "config.yaml")
    return tuple(
        group for entry in menu if isinstance(entry, dict) for group, choice in entry.items() if choice is None
    )


def order(chosen: Collection[str]) -> list[str]:
    """Return the groups in the order in which they are composed when the command line chooses some of them.

    Those come after the experiment, so that they win over it. The others come before it: an experiment may choose
    them too, and its own values win over their presets.
    """
    later = [group for group in group_names() if group in chosen and group not in BEFORE_EXPERIMENT]
    return [*(group for group in group_names() if group not in later), *later]


def names_in(choice: str) -> list[str]:
    """Return the presets that a choice names: one, several to compose (`[zero3,lora]`) or a sweep (`zero2,zero3`)."""
    return choice.strip("[]").split(",")


def preset_names(group: str, own: Path | None = None) -> list[str]:
    """Return the presets of a group, with those in the user's folder `own`; none for a group that does not exist. The
    tasks are dataclasses and no files."""
    if group == "task":
        return sorted(TASKS)
    folders = [folder / group for folder in (conf_dir(), own) if folder is not None]
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")} | generate_presets(group).keys())


def generate_presets(group: str) -> dict[str, dict[str, Any]]:
    """Return the presets that are not files: for each choice of the group's flag what it sets. What a scale sets is
    not said here, since it depends on the task."""
    if group == SCALE:
        return {name: {} for name in SCALES}
    if group not in CHOICES:
        return {}
    key, algorithms, others = CHOICES[group]
    return {choice: {key.rpartition(".")[2]: choice, **others} for choice in algorithms.names()}


def file_of(group: str, name: str, own: Path | None = None) -> Path | None:
    """Return the file of a preset; None where it is generated, or does not exist."""
    folders = [folder for folder in (conf_dir(), own) if folder is not None]
    return next((file for folder in folders if (file := folder / group / f"{name}.yaml").is_file()), None)


@cache
def read_preset(file: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return a preset's values and its defaults list as they are written; nothing of a file that is damaged, which the
    composition reports."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}, []
    values = content if isinstance(content, dict) else {}
    defaults = values.pop("defaults", None)
    return values, defaults if isinstance(defaults, list) else []


def task_of(group: str, name: str, own: Path | None = None) -> str | None:
    """Return the task that a preset chooses, as every experiment of the suite does."""
    file = file_of(group, name, own)
    _, defaults = read_preset(file) if file else ({}, [])
    return next((entry[TASK] for entry in defaults if isinstance(entry, dict) and TASK in entry), None)


def may_set(group: str, name: str, key: str, own: Path | None = None) -> bool:
    """Return whether a preset could set a flag: it names the flag's last word, or chooses other presets."""
    file = file_of(group, name, own)
    if file is None:
        return group == SCALE or any(key.endswith(f".{path}") for path in generate_presets(group).get(name, ()))
    values, defaults = read_preset(file)
    others = [entry for entry in defaults if entry != "_self_" and not (isinstance(entry, dict) and TASK in entry)]
    return bool(others) or key.rpartition(".")[2] in words_in(values)


def words_in(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of all keys in a table and in those within it."""
    for key, value in values.items():
        yield from str(key).split(".")
        yield from words_in(value) if isinstance(value, dict) else ()
