"""What the tests of engines share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest):
    """A Ray of this machine whose workers can unpickle what a file of tests defines."""
    import ray  # the tests for GPUs are collected without it, too

    ray.cloudpickle.register_pickle_by_value(request.module)
    ray.init(address="local", include_dashboard=False, object_store_memory=100 << 20, num_cpus=2, logging_level="ERROR")
    yield
    ray.shutdown()
