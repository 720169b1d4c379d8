"""Hydra's composition of conf/ and the dataclasses, with its errors turned into problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

import rlhf_suite
from rlhf_suite.config.names import did_you_mean
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.runs import TASKS

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError)


@dataclass
class Composed:
    """A composition split in the run's part and Hydra's own."""

    run: DictConfig
    hydra: DictConfig


def conf_dir() -> Path:
    """conf/ inside the installed package, else next to src/ in the repository."""
    package = Path(rlhf_suite.__file__).parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


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
    """Compose the menu with group choices, values and Hydra's own settings."""
    config = compose("config", overrides=overrides, return_hydra_config=True)
    with open_dict(config):
        hydra = config.pop("hydra")
    return Composed(config, hydra)


def search_path(folder: str) -> str:
    """`--config-dir` for the Compose API."""
    return f'hydra.searchpath=["file://{Path(folder).resolve()}"]'


def presets(group: str) -> list[str]:
    """The choices of a group of conf/, e.g. experiment."""
    loader = GlobalHydra.instance().config_loader()
    return [name for name in loader.get_group_options(group) if name != "config"]


def groups() -> list[str]:
    """The groups of conf/ and of Hydra itself."""
    loader = GlobalHydra.instance().config_loader()
    own = [name for name in loader.list_groups("") if name not in ("hydra", "_schema")]
    return own + [f"hydra/{name}" for name in loader.list_groups("hydra")]


def composition_problem(error: Exception, overrides: list[str]) -> Problem:
    """One problem from Hydra's words: a preset that does not exist, or a preset that does not fit the task."""
    text = str(error)
    if missing := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        group, name = missing.groups()
        options = presets(group)
        guess = did_you_mean(name, options)
        return Problem(group, f"no preset named {name}", guess or f"choose one of {', '.join(options)}")
    if "not in" in text or "Could not override" in text:
        key = next((word.partition("=")[0].lstrip("+") for word in overrides if mentioned(word, text)), overrides[-1])
        return Problem(key, first_line(text), "compare --info defaults and --help")
    return Problem(overrides[-1] if overrides else "conf", first_line(text), "see --help")


def mentioned(override: str, text: str) -> bool:
    key, _, value = override.partition("=")
    return key.lstrip("+~") in text or f"{key}/{value}" in text


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "cannot be composed")


def run_mode(hydra: DictConfig, multirun: bool) -> RunMode:
    """MULTIRUN by -m, or where a preset sets hydra.mode."""
    return RunMode.MULTIRUN if multirun or hydra.mode == RunMode.MULTIRUN else RunMode.RUN
