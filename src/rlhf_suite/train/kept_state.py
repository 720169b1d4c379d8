"""The state of a trained model in memory: several models that differ in their adapters take turns on the same ranks.

Each rank keeps what it holds: its parts of the weights in fp32, the moments of the optimiser, and the parameters that a
forward pass reads. Gradients that wait for an update are not a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_suite.train.parts import base_state, list_held_parts, local_part, state_of
from rlhf_suite.train.strategy import TrainedModel


@dataclass(frozen=True)
class KeptPart:
    """What a rank's optimiser holds of a parameter: the weight, tensors as long as it, and values of the whole."""

    weight: Tensor
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class KeptState:
    """The state of a model on one rank, by the names of its parameters."""

    parts: Mapping[str, KeptPart]
    parameters: Mapping[str, Tensor]  # flattened, as a forward pass reads them


@torch.no_grad()
def copy_state(model: TrainedModel, *, with_optimizer: bool = True) -> KeptState:
    """Return a copy of the weights and of the optimiser's state; without `with_optimizer` of the weights alone."""
    parts = {}
    for held in list_held_parts(model.module, model.engine.optimizer):
        tensors, values = state_of(held, model.engine.optimizer) if with_optimizer else ({}, {})
        parts[held.name] = KeptPart(
            held.weight.clone(),
            {key: tensor.clone() for key, tensor in tensors.items()},
            {key: copy_value(value) for key, value in values.items()},
        )
    trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    return KeptState(parts, {name: local_part(parameter)[1].clone() for name, parameter in trained.items()})


@torch.no_grad()
def put_state(model: TrainedModel, state: KeptState, *, with_optimizer: bool = True) -> None:
    """Do the inverse of `copy_state`; without `with_optimizer` for the weights alone."""
    for held in list_held_parts(model.module, model.engine.optimizer):
        part = state.parts[held.name]
        held.weight.copy_(part.weight)
        if with_optimizer:
            own = base_state(model.engine.optimizer)[held.owner]
            for key in {*own, *part.tensors} - {*part.values}:
                put_tensor(own, key, held, part.tensors.get(key))
            own.update({key: copy_value(value) for key, value in part.values.items()})
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            local_part(parameter)[1].copy_(state.parameters[name])
    model.forget_gathered()


def put_tensor(own: dict[str, Any], key: str, held: Any, value: Tensor | None) -> None:
    """Put a part of a tensor into the optimiser's state. None: the optimiser has not begun, so it and counts are 0."""
    if key not in own:
        own[key] = torch.zeros_like(held.owner)
    if not isinstance(own[key], Tensor):
        own[key] = 0
    elif own[key].shape != held.owner.shape:
        own[key].zero_()
    elif value is None:
        held.of(own[key]).zero_()
    else:
        held.of(own[key]).copy_(value)


def copy_value(value: Any) -> Any:
    """Return a copy of a value that belongs to a whole parameter, such as the count of updates."""
    return value.clone() if isinstance(value, Tensor) else value


def drop_gradients(model: TrainedModel) -> None:
    """Forget the gradients that wait for an update. DeepSpeed has no such call for all of its optimisers, so an update
    takes them, and what it has changed is put back."""
    before = copy_state(model)
    model.engine.step()
    put_state(model, before)
