"""Optimisers of one trained model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.errors import UserError


def parameter_groups(model: nn.Module, config: TrainedModelConfig) -> list[dict[str, object]]:
    """AdamW groups: weight decay on everything but biases, norms and other vectors. Empty groups are left out."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trained if decays(name, p)]
    exempt = [p for name, p in trained if not decays(name, p)]
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": config.adam.weight_decay, "decays": True},
        {"params": exempt, "weight_decay": 0.0, "decays": False},
    ]
    return [group for group in groups if group["params"]]


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix or more. Names of norms differ (`ln_1`, `norm_f`, `layer_norm1`), but all
    of them are vectors; biases of experts are the one kind that has more axes and no decay."""
    return len(whole_shape(parameter)) > 1 and not name.endswith("bias")


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of a parameter, also where ZeRO-3 has divided it and left a vector without numbers."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def adamw(model: nn.Module, config: TrainedModelConfig) -> torch.optim.AdamW:
    """Fused AdamW; needs no compiled extension."""
    adam = config.adam
    betas = (adam.betas[0], adam.betas[1])
    return torch.optim.AdamW(parameter_groups(model, config), lr=adam.lr, betas=betas, eps=adam.eps, fused=True)


def cpu_adamw(model: nn.Module, config: TrainedModelConfig) -> torch.optim.Optimizer:
    """Return AdamW as DeepSpeed computes it in host memory.

    Raises:
        UserError: it cannot be compiled here.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adam = config.adam
    try:
        return DeepSpeedCPUAdam(parameter_groups(model, config), lr=adam.lr, betas=adam.betas, eps=adam.eps)
    except RuntimeError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(
            f"ds.cpu_adam=deepspeed: DeepSpeedCPUAdam cannot be compiled here ({reason}). It needs a C++ compiler and "
            "ninja. Install them, or set ds.cpu_adam=torch"
        ) from error


def muon(model: nn.Module, config: TrainedModelConfig) -> torch.optim.Optimizer:
    """Return DeepSpeed's Muon with torch's AdamW beside it, so that nothing is compiled.

    A DeepSpeed engine that makes it by itself gives the head of a scalar model to Muon, and lets norms decay.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    groups = muon_groups(model, config)
    made = MuonWithAuxAdam(groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"foreach": None})
    optimizer: torch.optim.Optimizer = made
    return optimizer


def muon_groups(model: nn.Module, config: TrainedModelConfig) -> list[dict[str, object]]:
    """Return the groups of DeepSpeed's Muon, each of `parameter_groups` in two: hidden matrices, and what AdamW trains:
    embeddings, heads and vectors. DeepSpeed reads of each parameter, too, whether Muon trains it."""
    ends = {*embeddings_and_heads(model)}
    adam = {"lr": config.adam.lr, "betas": (config.adam.betas[0], config.adam.betas[1]), "eps": config.adam.eps}
    settings: dict[bool, dict[str, object]] = {
        True: {"lr": config.muon.lr, "momentum": config.muon.momentum},
        False: adam,
    }
    hidden = {p for name, p in model.named_parameters() if p not in ends and is_matrix(name, p)}
    for parameter in model.parameters():
        parameter.use_muon = parameter in hidden  # type: ignore[attr-defined] # torch's Parameter does not declare it
    return [
        {"params": params, "use_muon": by_muon, "weight_decay": group["weight_decay"], **settings[by_muon]}
        for by_muon in (True, False)
        for group in parameter_groups(model, config)
        if (params := [p for p in group["params"] if (p in hidden) is by_muon])  # type: ignore[attr-defined]
    ]


def moments_of(parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the names of the tensors that the optimiser keeps beside a parameter."""
    return ("momentum_buffer",) if getattr(parameter, "use_muon", False) else ("exp_avg", "exp_avg_sq")


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter has several rows and columns: the head of a scalar model has one row, a convolution
    of single channels one column. Positions and patches of images are embeddings by their names alone."""
    axes = [size for size in whole_shape(parameter) if size > 1]
    return len(axes) > 1 and decays(name, parameter) and "embed" not in name


def embeddings_and_heads(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the matrices with a row for each token."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield module.weight  # type: ignore[misc] # torch declares it as a Tensor
        elif (head := getattr(module, "get_output_embeddings", lambda: None)()) is not None:
            yield head.weight


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
