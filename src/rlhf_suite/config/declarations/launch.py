"""`launch`: devices, Ray, time limits."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rlhf_suite.config.declarations.flags import FREE, flag
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import ON_RAY

OF_RAY = ("launch.ray_address", "launch.num_cpus", "launch.object_store_mb")  # read where a run is on Ray
TRUSTED = "RLHF_SUITE_TRUST_REMOTE_CODE"  # launch.trust_remote_code on its way to every process of a run


def trusts_code() -> bool:
    """Return whether the run that this process belongs to runs the code of model folders."""
    return os.environ.get(TRUSTED) == "true"


@dataclass
class LaunchConfig(Section):
    """Devices, Ray and time limits of the run"""

    device: str = flag("auto", choices=("auto", "cpu", "cuda"), resume=FREE)
    """Type of device; auto: cuda on machines with a GPU, otherwise cpu"""
    ray_address: str | None = flag(None, resume=FREE, tasks=ON_RAY)
    """Address of a running Ray cluster (auto: the cluster of this machine); null: start a private cluster. A run with a
    single process does not use Ray, and ignores this flag and the next two"""
    num_cpus: int | None = flag(None, ge=1, resume=FREE, tasks=ON_RAY)
    """Number of CPU slots that Ray may use; null: the CPUs that this process may use"""
    object_store_mb: int | None = flag(None, ge=75, resume=FREE, tasks=ON_RAY)
    """Shared memory of Ray's object store on each node, in MiB; at least 75. Objects that do not fit are written to
    disk. null: enough for the samples of a step with data.max_len tokens each, on their way between driver, engines and
    models; `rlhf-suite plan` prints this size"""
    umask: str | None = flag(None, choices=("007", "027", "077"), resume=FREE)
    """Who else may read the files of the run. 027: only the group; 077: nobody; null: the umask of the process"""
    trust_remote_code: bool = flag(False, resume=FREE)
    """Run the Python code that comes with model folders and hub models (auto_map), in this process and in the engines.
    This code can do everything that you can do, so read it first"""
    timeout_s: float = flag(1800.0, gt=0, resume=FREE)
    """Time limit for each wait for an actor, in seconds since its last sign of life. Then the run ends and names the
    actor"""

    @property
    def store_bytes(self) -> int:
        """Return the bytes of Ray's object store on each node, once the plan has said how much null stands for."""
        assert self.object_store_mb is not None, "the plan has its number"
        return self.object_store_mb << 20
