"""Typed flags, the rules between them, and what follows from them: see the folders. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path


def name_program() -> str:
    """Return how the suite is called in this folder: by run.py in the repository, else by the installed command."""
    return "python run.py" if Path("run.py").is_file() else "rlhf-suite"


def conf_dir() -> Path:
    """Return the folder of the presets."""
    return shipped_folder("conf")


def shipped_folder(name: str) -> Path:
    """Return a folder inside the installed package, or next to src/ in the repository."""
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parents[1] / name
