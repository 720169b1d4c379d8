"""What the tests of engines share."""

from __future__ import annotations

import pytest

from local_ray import local_ray


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest):
    """A Ray of this machine whose workers can unpickle what a file of tests defines."""
    import ray  # the tests for GPUs are collected without it, too

    ray.cloudpickle.register_pickle_by_value(request.module)
    with local_ray(num_cpus=2):
        yield
