"""`launch`: devices, Ray, deadlines."""

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
    """How the run is brought up"""

    device: str = flag("auto", choices=("auto", "cpu", "cuda"), resume=FREE)
    """The kind of device; auto: cuda where there is a GPU"""
    ray_address: str | None = flag(None, resume=FREE, tasks=ON_RAY)
    """Address of a running Ray cluster (auto: the local one); null: start a private one. A run that is one process is
    not on Ray, and reads neither this flag nor the next two"""
    num_cpus: int | None = flag(None, ge=1, resume=FREE, tasks=ON_RAY)
    """CPU slots that Ray may use; null: those that this process may use"""
    object_store_mb: int | None = flag(None, ge=75, resume=FREE, tasks=ON_RAY)
    """Shared memory of Ray's object store on each node, in MiB; null: what the samples of a step take at one time on
    their way between driver, engines and models, if all have data.max_len tokens; at least 75. `rlhf-suite plan` says
    how much that is. What does not fit into a smaller one is written to the disk"""
    umask: str | None = flag(None, choices=("007", "027", "077"), resume=FREE)
    """Who else may read what the run writes: 027: only its group; 077: nobody; null: the umask of the process"""
    trust_remote_code: bool = flag(False, resume=FREE)
    """Run the Python code that model folders and hub models bring with them (auto_map), here and in the engines. It may
    do anything that you may do: read it first"""
    timeout_s: float = flag(1800.0, gt=0, resume=FREE)
    """Deadline of each wait for an actor, in seconds since its last sign of life; when it passes, the run ends and
    names the actor"""

    @property
    def store_bytes(self) -> int:
        """Return the bytes of Ray's object store on each node, once the plan has said how much null stands for."""
        assert self.object_store_mb is not None, "the plan has its number"
        return self.object_store_mb << 20
