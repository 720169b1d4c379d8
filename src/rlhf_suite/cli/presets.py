"""What conf/ offers, told without Hydra."""

from __future__ import annotations

from rlhf_suite.config.presets import conf_dir


def group_names() -> list[str]:
    """The groups of presets: task, experiment, ..."""
    return sorted(folder.name for folder in conf_dir().iterdir() if folder.is_dir())


def preset_names(group: str) -> list[str]:
    """The presets of a group; none for a group that does not exist."""
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))
