"""The ranks that train one model together, and the few collectives the suite needs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from rlhf_suite.config.train import TrainConfig
from rlhf_suite.losses.reduce import Mean


@dataclass(frozen=True)
class World:
    """One process's place among the ranks of its model. Without other ranks every collective is the identity."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the ranks, of a copy."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over the ranks, of a copy."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        result = tensor.detach().clone().to(self.device)
        if self.size > 1:
            dist.all_reduce(result, op=op)
        return result

    def gather(self, values: list[int]) -> list[int]:
        """The values of all ranks, rank by rank."""
        if self.size == 1:
            return values
        everyones: list[list[int]] = [[] for _ in range(self.size)]
        dist.all_gather_object(everyones, values)
        return list(chain.from_iterable(everyones))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def sum_means(self, metrics: dict[str, Mean]) -> dict[str, float]:
        """The exact mean of each metric over all ranks: total over total count. Every rank has the same names."""
        if not metrics:
            return {}
        names = sorted(metrics)
        local = torch.tensor(
            [[float(metrics[name].total), float(metrics[name].count)] for name in names], dtype=torch.float64
        )
        pairs = self.sum(local).tolist()
        return {name: total / count for name, (total, count) in zip(names, pairs, strict=True) if count > 0}


def seed_process(config: TrainConfig, rank: int) -> None:
    """Seed torch (dropout draws from it; ranks differ). With train.full_determinism_enable an operation that could
    give another result next time is an error."""
    torch.manual_seed(config.seed + rank)
    if config.full_determinism_enable:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def open_store(host: str, timeout: timedelta | None = None) -> dist.TCPStore:
    """A rendezvous store in this process that listens on `host` alone, at a port of its own.

    torch's own default is every address of the machine.
    """
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    options = {} if timeout is None else {"timeout": timeout}
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), **options
    )
