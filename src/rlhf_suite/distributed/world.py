"""The ranks that train one model together, and the few collectives the suite needs."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.losses.metrics import Deviation, Mean, Metric, Quantile, Ranking

T = TypeVar("T")
M_MMAP_THRESHOLD = -3  # of malloc.h
LARGE_TENSOR = 1 << 20  # bytes


@dataclass(frozen=True)
class World:
    """The place of one process among the ranks of its model, and the collectives over the data axis of their mesh.

    Over an axis of one rank every collective is the identity.
    """

    rank: int
    mesh: Mesh
    device: torch.device
    data_ranks: dist.ProcessGroup | None = None  # of the data axis through this rank; None: all ranks
    sequence_ranks: dist.ProcessGroup | None = None  # that split the tokens of this rank's batches; None: it alone
    tensor_ranks: dist.ProcessGroup | None = None  # that split the matrices of this rank's layers; None: it alone

    @staticmethod
    def of(rank: int, mesh: Mesh, device: torch.device) -> World:
        """Return the world of a process that has joined the process group of all ranks. Every rank calls it."""
        if mesh.size == mesh.data:
            return World(rank, mesh, device)
        sizes = (mesh.data, mesh.sequence, mesh.tensor)
        axes = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "sequence", "tensor"))
        sequence = axes.get_group("sequence") if mesh.sequence > 1 else None
        tensor = axes.get_group("tensor") if mesh.tensor > 1 else None
        return World(rank, mesh, device, axes.get_group("data"), sequence, tensor)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_index(self) -> int:
        """Return which part of each batch this rank works on."""
        return self.mesh.data_index(self.rank)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over the data axis."""
        return self._reduce(tensor, dist.ReduceOp.SUM, self.mesh.data, self.data_ranks)

    def sum_of_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over the ranks that split the matrices of this rank's layers."""
        return self._reduce(tensor, dist.ReduceOp.SUM, self.mesh.tensor, self.tensor_ranks)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over all ranks."""
        return self._reduce(tensor, dist.ReduceOp.MAX, self.mesh.size, None)

    def _reduce(self, tensor: torch.Tensor, op: Any, size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
        if size == 1:
            return tensor.detach().clone()
        result = tensor.detach().clone().to(self.device)
        dist.all_reduce(result, op=op, group=group)
        return result

    def gather(self, values: list[T]) -> list[T]:
        """Return the values of all ranks of the data axis, rank by rank."""
        if self.mesh.data == 1:
            return values
        everyones: list[list[T]] = [[] for _ in range(self.mesh.data)]
        dist.all_gather_object(everyones, values, group=self.data_ranks)
        return list(chain.from_iterable(everyones))

    def peak_memory_gb(self) -> float:
        """Return the most memory that any rank has used so far, in GiB: allocated on the GPU, or resident on a CPU."""
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated()
        else:
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux gives KiB
        return float(self.max(torch.tensor(float(used)))) / 2**30

    def barrier(self) -> None:
        """Wait for all ranks of the model."""
        if self.mesh.size > 1:
            dist.barrier()

    def combine(self, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Return each metric, exact over all ranks, except those without a case. Every rank has the same names. The
        host reads the device twice at most: what is added up, and the cases of metrics that keep them."""
        added = {name: metric for name, metric in metrics.items() if isinstance(metric, Mean | Deviation)}
        listed = {name: metric for name, metric in metrics.items() if isinstance(metric, Quantile | Ranking)}
        sums = self._read_together({name: metric.sums() for name, metric in added.items()}, self.sum)
        own = self._read_together({name: metric.columns() for name, metric in listed.items()}, torch.clone)
        ranks = self.gather([own]) if listed else []
        result = {name: metric.of_sums(*sums[name].tolist()) for name, metric in added.items()}
        for name, metric in listed.items():
            result[name] = metric.of_columns(torch.cat([columns[name] for columns in ranks], 1))
        return {name: value for name, value in sorted(result.items()) if value is not None}

    def _read_together(
        self, values: dict[str, torch.Tensor], reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return tensors in host memory, by one copy of what `reduce` makes of all of them."""
        if not values:
            return {}
        flat = torch.cat([value.flatten().to(self.device) for value in values.values()])
        parts = reduce(flat).cpu().split([value.numel() for value in values.values()])
        return {name: part.view(value.shape) for (name, value), part in zip(values.items(), parts, strict=True)}


def give_back_freed_memory() -> None:
    """Have the C library give back the memory of each tensor of a MiB or more when it is freed, in this process.

    glibc raises that limit by itself, up to 32 MiB, whenever a larger one is freed. Tensors below it lie side by side,
    and those that live on keep the memory of freed ones between them: runs with adapters or ZeRO-3 took up to twice as
    much on a CPU (docs/planner_measured.md). A limit of the user's, MALLOC_MMAP_THRESHOLD_, stays; so do other C
    libraries.
    """
    library = ctypes.CDLL(None)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, LARGE_TENSOR)


def seed_process(config: TrainConfig, world: World) -> None:
    """Seed torch, from which dropout draws; ranks differ, except those that hold parts of the same matrices and compute
    the same activations. With train.full_determinism_enable an operation that may give another result the next time is
    an error."""
    torch.manual_seed(config.seed + world.mesh.replica_index(world.rank))
    if config.full_determinism_enable:
        os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def rng_state() -> dict[str, torch.Tensor]:
    """Return the states of this process's generators of random numbers."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Put back what `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def open_store(host: str, timeout: timedelta | None = None, size: int | None = None) -> dist.TCPStore:
    """Open a rendezvous store in this process that listens on `host` alone, at a free port.

    By default torch would listen on every address of the machine. `size`: of a group whose first rank is in this
    process, and which uses this store instead of opening one.
    """
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    options |= {} if size is None else {"world_size": size, "multi_tenant": True}
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), **options
    )
