"""`launch`: devices, Ray, deadlines."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rlhf_suite.config.flags import FREE, flag

TRUSTED = "RLHF_SUITE_TRUST_REMOTE_CODE"  # launch.trust_remote_code on its way to every process of a run


def trusts_code() -> bool:
    """Return whether the run that this process belongs to runs the code of model folders."""
    return os.environ.get(TRUSTED) == "true"


@dataclass
class LaunchConfig:
    """How the run is brought up"""

    device: str = flag(
        "auto", "The kind of device; auto: cuda where there is a GPU", choices=("auto", "cpu", "cuda"), resume=FREE
    )
    ray_address: str | None = flag(
        None, "Address of a running Ray cluster (auto: the local one); null: start a private one", resume=FREE
    )
    num_cpus: int | None = flag(
        None, "CPU slots that Ray may use; null: those that this process may use", ge=1, resume=FREE
    )
    object_store_mb: int = flag(256, "Ray's shared-memory store in MiB", ge=80, resume=FREE)
    umask: str | None = flag(
        None,
        "Who else may read what the run writes: 027: only its group; 077: nobody; null: the umask of the process",
        choices=("007", "027", "077"),
        resume=FREE,
    )
    trust_remote_code: bool = flag(
        False,
        "Run the Python code that model folders and hub models bring with them (auto_map), here and in the engines. It "
        "may do anything that you may do: read it first",
        resume=FREE,
    )
    timeout_s: float = flag(
        1800.0,
        "Deadline of each wait for an actor, in seconds; when it passes, the run ends and names the actor",
        gt=0,
        resume=FREE,
    )
