"""Optimisers of one trained model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from rlhf_suite.config.declarations.models import TrainedModelConfig

NO_DECAY = ("bias", "norm.weight", "layer_norm.weight", "layernorm.weight", "ln_f.weight")
NOT_MUON = ("embed", "lm_head", "score")


def parameter_groups(model: nn.Module, config: TrainedModelConfig) -> list[dict[str, object]]:
    """AdamW groups: weight decay on everything but biases and norms. Empty groups are left out."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trained if not name.endswith(NO_DECAY)]
    exempt = [p for name, p in trained if name.endswith(NO_DECAY)]
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": config.adam.weight_decay, "decays": True},
        {"params": exempt, "weight_decay": 0.0, "decays": False},
    ]
    return [group for group in groups if group["params"]]


def adamw(model: nn.Module, config: TrainedModelConfig) -> torch.optim.AdamW:
    """Fused AdamW; needs no compiled extension."""
    adam = config.adam
    betas = (adam.betas[0], adam.betas[1])
    return torch.optim.AdamW(parameter_groups(model, config), lr=adam.lr, betas=betas, eps=adam.eps, fused=True)


def mark_muon_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Muon takes the hidden matrices; embeddings, heads and vectors stay with AdamW."""
    for name, parameter in named_parameters:
        matrix = getattr(parameter, "ds_shape", parameter.shape)
        # DeepSpeed reads this attribute, which torch's Parameter does not declare.
        parameter.use_muon = len(matrix) >= 2 and not any(part in name for part in NOT_MUON)  # type: ignore[attr-defined]


def muon_config(config: TrainedModelConfig) -> dict[str, object]:
    """DeepSpeed's Muon entry; AdamW parameters use torch's implementation, so nothing is compiled."""
    return {
        "type": "Muon",
        "params": {
            "muon_lr": config.muon.lr,
            "adam_lr": config.adam.lr,
            "momentum": config.muon.momentum,
            "betas": config.adam.betas,
            "eps": config.adam.eps,
            "weight_decay": config.adam.weight_decay,
            "torch_adam": True,
        },
    }


def clip_and_guard(
    optimizer: torch.optim.Optimizer,
    max_norm: Callable[[], float],
    record: Callable[[float], None],
    norm_of: Callable[[list[nn.Parameter]], torch.Tensor],
) -> torch.utils.hooks.RemovableHandle:
    """For an optimiser without ZeRO around it: before each step record the norm of all gradients, which `norm_of` its
    parameters gives, clip to `max_norm()` (0: do not), and drop all gradients when the norm is not finite, so that the
    step changes nothing."""

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = list(_with_gradients(optimizer))
        norm = norm_of(parameters)
        value = float(norm)  # the one time in a step that the host waits for the device
        record(value)
        if not math.isfinite(value):
            for parameter in parameters:
                parameter.grad = None
        elif (largest := max_norm()) > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)

    return optimizer.register_step_pre_hook(before_step)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the norm of all gradients of parameters that this rank has whole."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def _with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if p.grad is not None)
