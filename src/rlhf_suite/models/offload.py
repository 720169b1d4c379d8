"""A frozen model whose weights stay in host memory: a module's are on the device for its own forward pass only."""

from __future__ import annotations

import torch
from accelerate import cpu_offload
from torch import nn


def stream_from_host(model: nn.Module, device: torch.device) -> nn.Module:
    """Hold the weights on the host, pinned where that speeds copies up, and run forward passes on `device`."""
    weights = {name: weight.detach().to("cpu") for name, weight in model.state_dict().items()}
    if device.type == "cuda":
        weights = {name: weight.pin_memory() for name, weight in weights.items()}
    streamed: nn.Module = cpu_offload(model, execution_device=device, state_dict=weights)
    return streamed
