"""Hydra's composition of conf/ and the dataclasses, with its errors turned into problems."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from rlhf_suite.cli.presets import group_names
from rlhf_suite.config.formatting import did_you_mean
from rlhf_suite.config.presets import conf_dir
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import TASKS, Run

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError)


@dataclass(frozen=True)
class Composed:
    """A composition: the run's part, and the whole with Hydra's own under `hydra`."""

    run: DictConfig
    whole: DictConfig


@cache
def register() -> None:
    """Make each task's dataclasses the schema that its conf/task file names first."""
    store = ConfigStore.instance()
    for name, root in TASKS.items():
        store.store(group="_schema", name=name, node=root, package="_global_")


@contextmanager
def hydra_ready() -> Iterator[None]:
    """Hydra's Compose API over conf/."""
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir()), job_name="run"):
        yield


def composed(overrides: list[str]) -> Composed:
    """Compose the menu with choices of presets and Hydra's own settings."""
    whole = compose("config", overrides=overrides, return_hydra_config=True)
    run = copy.deepcopy(whole)
    with open_dict(run):
        run.pop("hydra")
    return Composed(run, whole)


def search_path(folder: str) -> str:
    """`--config-dir` for the Compose API."""
    return f'hydra.searchpath=["file://{Path(folder).expanduser().resolve()}"]'


def presets(group: str) -> list[str]:
    """The choices of a group of conf/, e.g. experiment."""
    loader = GlobalHydra.instance().config_loader()
    return [name for name in loader.get_group_options(group) if name != "config"]


@cache
def compose_blaming(*overrides: str) -> tuple[Composed, list[Problem]]:
    """Compose; words that do not compose with those before them are left out, each as a problem.

    The results are kept and shared: copy before changing one.
    """
    try:
        return composed(list(overrides)), []
    except COMPOSE_ERRORS:
        good: list[str] = []
        problems = []
        for word in overrides:
            try:
                composed([*good, word])
                good.append(word)
            except COMPOSE_ERRORS as error:
                problems.append(blame(word, str(error)))
        return composed(good), problems


def blame(word: str, reason: str) -> Problem:
    """The problem of one word that does not compose: no such preset, or a preset that does not fit the task."""
    key, _, value = word.lstrip("+~").partition("=")
    if f"Could not find '{key}/" in reason:
        options = presets(key)
        close = did_you_mean(value, options)
        fix = (
            close.replace("did you mean ", f"did you mean {key}=") if close else f"choose {key}={' or '.join(options)}"
        )
        hint = f"; for a model write {Run.MODEL}={value}" if key == "actor" else ""
        return Problem(key, f"there is no preset {key}/{value}", fix + hint)
    if key in group_names():
        what = f"{value} does not fit this task: {one_line(reason)}"
        return Problem(key, what, f"leave {word} away, or change task=")
    return Problem(key, one_line(reason), "see --info config and --cfg hydra")


def one_line(reason: str) -> str:
    """The first sentences of one of Hydra's errors."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if lines[0].endswith("composing config:"):  # names a file, and the fault only in the next line
        return lines[1]
    return " ".join(lines[:2]) if lines[0].endswith(".") else lines[0]
