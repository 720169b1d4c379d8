"""Weights of a frozen model that are in host memory, and on its device only while it computes (`*.offload`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

HOST_WEIGHTS = "host_weights"  # the attribute of a model that has them


class HostWeights:
    """The weights of a model, moved to host memory when this is made; under ZeRO-3 the part of this rank.

    They go to the device as a whole, once for all forward passes of a phase, and nothing comes back: the copy in host
    memory, which is pinned beside a GPU, stays.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device, self.moves, self.are_on_device = device, 0, False
        self.kept = list[tuple[torch.Tensor, torch.Tensor]]()
        for parameter in model.parameters():
            weight = getattr(parameter, "ds_tensor", parameter)
            host = weight.detach().to("cpu")
            self.kept.append((weight, host.pin_memory() if device.type == "cuda" else host))
        for buffer in model.buffers():
            buffer.data = buffer.to(device)
        self._put_back()

    def _put_back(self) -> None:
        for weight, host in self.kept:
            weight.data = host

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the weights on the device within the block. Within another such block they are there already, and stay
        until that one ends."""
        if self.are_on_device:
            yield
            return
        self.moves += 1
        try:
            for weight, host in self.kept:
                weight.data = host.to(self.device, non_blocking=True, copy=True)
            self.are_on_device = True
            yield
        finally:
            self.are_on_device = False
            self._put_back()


def keep_on_host(model: nn.Module, device: torch.device) -> HostWeights:
    """Keep the weights of a model in host memory from now on; `on_device` brings them to `device`."""
    weights = HostWeights(model, device)
    setattr(model, HOST_WEIGHTS, weights)
    return weights


@contextmanager
def on_device(*models: object) -> Iterator[None]:
    """Have the weights of those of the models that keep them in host memory on their devices within the block. A model
    may have another one around it, as `module`."""
    with ExitStack() as stack:
        for model in models:
            weights = getattr(getattr(model, "module", model), HOST_WEIGHTS, None)
            if weights is not None:
                stack.enter_context(weights.on_device())
        yield
