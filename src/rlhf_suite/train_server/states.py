"""States of models on disk: their addresses, and the folders in which they are written.

A state is a folder of versions, each a store of checkpoints; an older version goes once a newer one is whole. A version
without a checkpoint is one whose writing has failed or was cut off, and counts for nothing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_suite.config.declarations.ckpt import CheckpointConfig
from rlhf_suite.serving.http_server import BadRequest
from rlhf_suite.train.checkpoint import CheckpointStore

LATEST = "latest"  # the state that the server writes itself
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
SCHEME, STATES, SAMPLERS = "tinker://", "weights", "sampler_weights"


class StateFolders:
    """The states below a folder, by model, kind (STATES, SAMPLERS) and name."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder, self.config = folder, config

    def has_checkpoint(self, version: Path) -> bool:
        """Return whether a version was written to its end."""
        return bool(CheckpointStore(self.config, version).list_all())

    def versions(self, state: Path) -> list[Path]:
        """Return the versions of a state that were written to their end, the oldest first."""
        return [version for version in sorted(state.glob("v*")) if self.has_checkpoint(version)]

    @contextmanager
    def new_version(self, state: Path, number: int | None = None) -> Iterator[Path]:
        """Yield the folder of a version to write into: the next one, or the one with a number. The others are removed
        once it is whole."""
        known = [int(version.name[1:]) for version in state.glob("v*")]
        path = state / f"v{max(known, default=0) + 1 if number is None else number:06d}"
        yield path
        for version in state.glob("v*"):
            if version != path:
                shutil.rmtree(version, ignore_errors=True)  # what stays counts for nothing: it is older

    def path_of(self, address: str, kind: str) -> Path:
        """Return the folder that an address (tinker://<model>/<kind>/<name>) names, which need not be there."""
        parts = address.removeprefix(SCHEME).split("/")
        if not address.startswith(SCHEME) or len(parts) != 3 or parts[1] != kind:
            raise BadRequest(f"{address} is not an address of {kind}. Write {SCHEME}<model>/{kind}/<name>")
        return self.folder.joinpath(check_name(parts[0]), kind, check_name(parts[2]))

    def find(self, address: str, kind: str) -> Path:
        """Return the newest version at an address; raise BadRequest if there is none."""
        state = self.path_of(address, kind)
        if versions := self.versions(state):
            return versions[-1]
        raise BadRequest(f"there is nothing at {address} (looked in {state}). Save it first, or correct the address")


def address_of(model: str, kind: str, name: str) -> str:
    """Return the address of a state; raise BadRequest if its name could not be that of a folder."""
    return f"{SCHEME}{model}/{kind}/{check_name(name)}"


def check_name(name: str) -> str:
    """Return a part of an address; raise BadRequest if it could not be the name of a folder."""
    if not NAME.fullmatch(name):
        raise BadRequest(f"{name!r:.100} is not a name. Use letters, digits, and . _ : - between them")
    return name
