"""The NVIDIA driver and the GPUs of this machine, read through NVML: no CUDA is set up, and no GPU is occupied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One GPU. Bytes are of its memory; `processes` are the numbers of those that hold some of it, of any user."""

    name: str
    uuid: str
    capability: tuple[int, int]
    total: int
    free: int
    is_exclusive: bool = False  # its compute mode lets one process use it at a time
    has_partitions: bool = False  # MIG is on
    processes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver, and the GPUs that this process may use."""

    version: str
    gpus: tuple[GPU, ...]
    num_hidden: int = 0  # GPUs that CUDA_VISIBLE_DEVICES leaves out

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])


def read_driver() -> Driver | str | None:
    """Return the driver and its GPUs; what NVML says if it does not work; None where there is no driver."""
    import pynvml

    try:
        with nvml():
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            gpus = [read_gpu(handle) for handle in handles]
            visible = [gpu for index, gpu in enumerate(gpus) if is_visible(index, gpu)]
            return Driver(str(pynvml.nvmlSystemGetDriverVersion()), tuple(visible), len(gpus) - len(visible))
    except pynvml.NVMLError_LibraryNotFound:
        return None
    except pynvml.NVMLError as error:
        return str(error)


@contextmanager
def nvml() -> Iterator[None]:
    """Keep NVML open for the block."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def read_gpu(handle: object) -> GPU:
    """Return what NVML says of a GPU. Virtual GPUs do not answer every question."""
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    mode, partitions, processes = pynvml.NVML_COMPUTEMODE_DEFAULT, False, []
    with suppress(pynvml.NVMLError):
        mode = pynvml.nvmlDeviceGetComputeMode(handle)
    with suppress(pynvml.NVMLError):
        partitions = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    with suppress(pynvml.NVMLError):
        processes = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return GPU(
        str(pynvml.nvmlDeviceGetName(handle)),
        str(pynvml.nvmlDeviceGetUUID(handle)),
        tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory.total,
        memory.free,
        mode != pynvml.NVML_COMPUTEMODE_DEFAULT,
        partitions,
        tuple(processes),
    )


def is_visible(index: int, gpu: GPU) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES leaves a GPU, or a partition of it, to this process.

    The variable has numbers, beginnings of names, and names of partitions. The last do not say on which GPU they are:
    any of them makes all divided GPUs count as visible.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    words = [word.strip() for word in visible.split(",")]
    return any(
        word == str(index)
        or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        or (word.startswith("MIG-") and gpu.has_partitions)
        for word in words
    )
