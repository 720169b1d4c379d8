"""Training on one rank by torch alone (ds.zero_stage=null): what `TrainedModel` uses of a DeepSpeed engine.

A bf16 parameter has an fp32 master, which the optimiser updates; the parameter is the rounded master, as in DeepSpeed.
An fp32 parameter is its own master.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.train import optim


class MasterWeights:
    """AdamW over the masters of the trained parameters."""

    def __init__(self, module: nn.Module, config: TrainedModelConfig) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        self.masters: dict[nn.Parameter, Tensor] = {
            p: p if p.dtype == torch.float32 else p.detach().float() for p in trained
        }
        self.optimizer = optim.adamw(module, config)
        for group in self.optimizer.param_groups:
            group["params"] = [self.masters[p] for p in group["params"]]
        self.rounded = [(p, master) for p, master in self.masters.items() if master is not p]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def add_up_in_fp32(self) -> None:
        """Have each backward pass add its bf16 gradients to fp32 sums, and keep none of them."""
        for parameter, _ in self.rounded:
            parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        master, gradient = self.masters[parameter], parameter.grad
        parameter.grad = None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient

    @torch.no_grad()
    def step(self) -> None:
        """Update with the gradients since the last step, and forget them."""
        for parameter, _ in self.rounded:
            if parameter.grad is not None:  # sums in bf16
                self._add(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for parameter, master in self.rounded:
            parameter.copy_(master)


class TorchEngine:
    """A model that torch trains on one rank."""

    def __init__(self, module: nn.Module, config: TrainedModelConfig, ds: DeepSpeedConfig) -> None:
        self.module, self.optimizer, self._norm = module, MasterWeights(module, config), 0.0
        self.max_norm = config.max_norm
        if ds.grad_accum_dtype == "fp32":
            self.optimizer.add_up_in_fp32()
        optim.clip_and_guard(self.optimizer.optimizer, lambda: self.max_norm, self._record_norm, optim.gradient_norm)

    def _record_norm(self, norm: float) -> None:
        self._norm = norm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`."""
        loss.backward()

    def step(self) -> None:
        """Update once; where the norm of the gradient is not finite nothing changes."""
        self.optimizer.step()

    def get_global_grad_norm(self) -> float:
        """Return the norm of the gradient of the last step, before it was clipped."""
        return self._norm
