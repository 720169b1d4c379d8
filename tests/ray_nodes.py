"""A real Ray cluster of several nodes on one machine, which leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster


@contextmanager
def ray_nodes(*nodes: dict[str, Any]) -> Iterator[Cluster]:
    """Start a cluster of these nodes, the head first, and join it. Its sockets, logs and sessions are in a folder of
    its own, whose name is short: that of a socket has at most 107 bytes."""
    with TemporaryDirectory(prefix="nodes-") as folder, pytest.MonkeyPatch.context() as environment:
        environment.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)  # the cluster writes its address there
        head = nodes[0] | {"include_dashboard": False, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for node in nodes[1:]:
                cluster.add_node(**node)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
