"""Which devices the run uses, and the environment of its processes; both are decided before any heavy import."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from rlhf_suite.config.declarations.launch import TRUSTED, LaunchConfig
from rlhf_suite.launch.processes import ask
from rlhf_suite.machine_limits import cpu_count

QUIET = {
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of calls that nobody waits for any more, after another call's failure
}
DRIVER_S = 30.0  # for the driver of GPUs to answer
UMASK = "RLHF_SUITE_UMASK"  # launch.umask on its way to the actors
NO_TELEMETRY = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


def device_kind(config: LaunchConfig) -> str:
    """Return "cuda" or "cpu": what launch.device says, or "cuda" where this machine has a GPU."""
    if config.device == "auto":
        return "cuda" if gpu_count() else "cpu"
    return config.device


def cluster_to_join(config: LaunchConfig) -> str | None:
    """Return the address of the Ray cluster that a run joins; None if it joins none, as in tasks without Ray."""
    return config.ray_address if config.has("ray_address") else None


def gpu_count() -> int:
    """Return the number of GPUs that this process may use, found without torch."""
    return len(list_gpus())


def list_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them; without this variable
    their numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(count_gpus())]
    names = [device.strip() for device in visible.split(",")]
    return [name for name in names if name not in ("", "-1", "NoDevFiles")]


@cache
def count_gpus() -> int:
    """Return the number of GPUs of this machine. It is counted once: that may take a process. There is none where the
    driver does not answer."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if devices or shutil.which("nvidia-smi") is None:
        return devices
    listing = ask(["nvidia-smi", "-L"], DRIVER_S)
    return sum(line.startswith("GPU ") for line in listing.splitlines())


@contextmanager
def limit_rights(config: LaunchConfig) -> Iterator[None]:
    """Limit the rights of new files to what launch.umask leaves, here and in every process started here."""
    before, said = os.umask(0o077), os.environ.get(UMASK)
    os.umask(before | int(config.umask or "0", 8))
    os.environ[UMASK] = config.umask or "0"
    try:
        yield
    finally:
        os.umask(before)
        os.environ.pop(UMASK)
        if said is not None:
            os.environ[UMASK] = said


def adopt_umask() -> None:
    """Take over launch.umask in a process that a foreign Ray cluster has started: it inherits that cluster's."""
    os.umask(os.umask(0o077) | int(os.environ.get(UMASK, "0"), 8))


def pass_on_trust(config: LaunchConfig) -> None:
    """Have this process and all that it starts run the code of model folders, or not."""
    os.environ[TRUSTED] = "true" if config.trust_remote_code else "false"


def runtime_env(device: str) -> dict[str, str]:
    """Return the environment variables of the driver and every actor; what the user has set already is kept.

    CPU: one thread per process, and threads that sleep while they wait. Several processes share the cores here, and
    OpenMP's default of spinning makes them up to ten times slower.
    """
    values = _profile(device) | QUIET | NO_TELEMETRY | {UMASK: "0", TRUSTED: "false"}
    return {name: os.environ.get(name, value) for name, value in values.items()} | (
        {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    )


def _profile(device: str) -> dict[str, str]:
    if device == "cpu":
        # DeepSpeed has Muon compiled to C++ at its first step: minutes, for an update of milliseconds.
        compiled = {"TORCHDYNAMO_DISABLE": "1"}
        return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"} | compiled
    # An actor per GPU: each gets its part of the cores, for the optimiser when it runs in host memory.
    return {"OMP_NUM_THREADS": str(max(1, cpu_count() // max(1, gpu_count()))), "DS_ACCELERATOR": "cuda"}
