"""A Ray cluster of this machine for tests, which leaves nothing behind: it has a session as runs have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_suite.launch.session import environment, session

STORE = 100 << 20  # bytes of the object store


@contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """Start Ray with further options of `ray.init` for the block."""
    import ray  # tests of other kinds import this module without it

    with session() as made, environment(made.environment):
        ray.init(
            address="local",
            include_dashboard=False,
            _temp_dir=str(made.ray),
            **{"object_store_memory": STORE, "logging_level": "ERROR"} | options,
        )
        try:
            yield
        finally:
            ray.shutdown()
