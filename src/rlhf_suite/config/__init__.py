"""Typed flags, the rules between them, and what follows from them: see the folders. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """Return conf/ inside the installed package, or next to src/ in the repository."""
    package = Path(__file__).parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"
