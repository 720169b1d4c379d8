"""The keys that presets set, by Hydra's own defaults list."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from rlhf_suite.composition.compose import add_to_search_path, hydra_ready, list_sources, search_path


@cache
def keys_set(group: str, name: str, own: Path | None = None) -> frozenset[str]:
    """Return the dotted keys that a preset sets, with those of the presets that it builds upon."""
    added, folders = ([add_to_search_path(str(own))], [search_path(str(own))]) if own else ([], [])
    with hydra_ready():
        sources = list_sources([*added, f"{group}={name}"], folders)
    return frozenset().union(*(source.keys for source in sources))
