"""A real private Ray cluster, once per module."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.launch.ray_cluster import ray_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ray_cluster(
        LaunchConfig.of("ppo", device="cpu", num_cpus=2, object_store_mb=80), tmp_path_factory.mktemp("run"), slots=4
    ):
        yield
