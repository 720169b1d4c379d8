"""conf/ on disk: where it is and what it offers, told without Hydra."""

from __future__ import annotations

from pathlib import Path

import rlhf_suite


def conf_dir() -> Path:
    """conf/ inside the installed package, else next to src/ in the repository."""
    package = Path(rlhf_suite.__file__).parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def group_names() -> list[str]:
    """The groups of presets: task, experiment, ..."""
    return sorted(folder.name for folder in conf_dir().iterdir() if folder.is_dir())


def preset_names(group: str) -> list[str]:
    """The presets of a group; none for a group that does not exist."""
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))
