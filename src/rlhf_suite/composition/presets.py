"""The groups of presets: which there are, what each preset sets, and in which order they are composed; without Hydra.

A preset is a file of conf/<group>/ or of the same folder below `--config-dir`. The groups of `CHOICES` have more: one
preset for each value of a flag, so that a new estimator is a preset too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_suite.config.names import flags_of
from rlhf_suite.config.presets import conf_dir

# Group -> the flag whose choices are presets, and what else such a preset sets.
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "algo/advantage": ("algo.advantage.estimator", {}),
    "reward": ("reward.rule", {"remote_url": None, "rubric": None, "model_name_or_path": None}),
}
# Groups that stay before the experiment, whoever chooses them.
BEFORE_EXPERIMENT = ("task", "demo", "experiment")


@cache
def group_names() -> tuple[str, ...]:
    """Return the groups of presets in the order in which they are composed: those of the menu, conf/config.yaml."""
    return tuple(re.findall(r"^  - ([a-z_/]+): null", (conf_dir() / "config.yaml").read_text(), re.MULTILINE))


def order(chosen: Collection[str]) -> list[str]:
    """Return the groups in the order in which they are composed when the command line chooses some of them.

    Those come behind the experiment, so that they win over it. The others come before it: an experiment may choose
    them too, and its own values win over their presets.
    """
    later = [group for group in group_names() if group in chosen and group not in BEFORE_EXPERIMENT]
    return [*(group for group in group_names() if group not in later), *later]


def names_in(choice: str) -> list[str]:
    """Return the presets that a choice names: one, several to compose (`[zero3,lora]`) or a sweep (`zero2,zero3`)."""
    return choice.strip("[]").split(",")


def preset_names(group: str, own: Path | None = None) -> list[str]:
    """Return the presets of a group, with those in the user's folder `own`; none for a group that does not exist."""
    folders = [folder / group for folder in (conf_dir(), own) if folder is not None]
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")} | generate_presets(group).keys())


def generate_presets(group: str) -> dict[str, dict[str, Any]]:
    """Return the presets that are no files: for each choice of the group's flag what it sets."""
    if group not in CHOICES:
        return {}
    key, others = CHOICES[group]
    name = key.rpartition(".")[2]
    return {str(choice): {name: choice, **others} for choice in flags_of(None)[key].meta.choices or ()}


def file_of(group: str, name: str, own: Path | None = None) -> Path | None:
    """Return the file of a preset; None where it is generated, or does not exist."""
    folders = [folder for folder in (conf_dir(), own) if folder is not None]
    return next((file for folder in folders if (file := folder / group / f"{name}.yaml").is_file()), None)


def keys_set(group: str, name: str, own: Path | None = None) -> set[str]:
    """Return the dotted keys that a preset sets, with those of the presets of its group that it builds upon."""
    prefix = f"{group.replace('/', '.')}."
    file = file_of(group, name, own)
    if file is None:
        return {f"{prefix}{key}" for key in generate_presets(group).get(name, ())}
    from omegaconf import OmegaConf

    from rlhf_suite.config.flags import flat

    content = OmegaConf.to_container(OmegaConf.load(file))
    values = {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    bases = [base for base in values.pop("defaults", None) or () if isinstance(base, str) and base != "_self_"]
    keys = flat(values).keys()
    is_global = re.search(r"^#\s*@package\s+_global_", file.read_text(), re.MULTILINE)  # keys count from the root
    own_keys = set(keys) if is_global else {f"{prefix}{key}" for key in keys}
    return own_keys.union(*(keys_set(group, base, own) for base in bases if base != name))


def task_of(group: str, name: str, own: Path | None = None) -> str | None:
    """Return the task that a preset chooses, as every experiment of the suite does."""
    file = file_of(group, name, own)
    match = re.search(r"^\s*- override /task: (\w+)\s*$", file.read_text(), re.MULTILINE) if file else None
    return match[1] if match else None


def may_set(group: str, name: str, key: str, own: Path | None = None) -> bool:
    """Return whether a preset could set a flag: it names the flag's last word, or chooses other presets."""
    file = file_of(group, name, own)
    if file is None:
        return any(key.endswith(f".{path}") for path in generate_presets(group).get(name, ()))
    lines = (line.strip() for line in file.read_text().splitlines())
    words = [line for line in lines if not line.startswith("#") and not line.startswith("- override /task:")]
    return any(key.rpartition(".")[2] in line or (line.startswith("- ") and line != "- _self_") for line in words)


def preset_keys(
    presets: Mapping[str, str | list[str]], chosen: Collection[str], own: Path | None = None
) -> Iterator[tuple[str, set[str]]]:
    """Yield the presets of a run, the one that wins first: its name and the keys that it sets."""
    for group in reversed(order(chosen)):
        names = presets.get(group) or []
        for name in [names] if isinstance(names, str) else reversed(names):
            suffix = ".yaml" if file_of(group, name, own) else ""
            yield f"{group}/{name}{suffix}", keys_set(group, name, own)
