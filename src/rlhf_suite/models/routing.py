"""Routing replay: the experts that an engine chose for each token, taken again by the model in training (R3,
arXiv:2510.11370).

Engine and trainer round otherwise, and near a tie they send a token to other experts; then their log-probs differ by
much more than rounding. With replay each router takes the experts of the engine in place of its own top k. Their
weights still come from the router's own logits, so it has its gradient. Where no route is known, the router chooses
itself.

T tokens, M layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_suite.models.attention import SequenceLayout
from rlhf_suite.models.families import Family

ARGUMENT = "routes"  # of a layer's forward pass
UNKNOWN = -1


class Routes:
    """The routes of one forward pass, and which of them the routers would have chosen otherwise."""

    def __init__(self, experts: Tensor) -> None:
        self.experts = experts  # [rows, M, K], `UNKNOWN` where a router chooses itself
        self.rerouted = torch.zeros(experts.shape[:2], dtype=torch.bool, device=experts.device)
        self.layers: set[int] = set()  # that have taken them

    @property
    def taken(self) -> int:
        """The number of layers that have taken their routes."""
        return len(self.layers)


def arrange(routes: Tensor, sequences: SequenceLayout) -> Tensor:
    """Return routes [T, M, K] of a batch as those of the rows of a forward pass, or of this rank's part of them."""
    rows = len(sequences.positions)
    if not sequences.packed:
        whole = routes.new_full((len(sequences.cu_lengths) - 1, sequences.max_length, *routes.shape[1:]), UNKNOWN)
        return whole.flatten(0, 1).index_copy(0, sequences.slots, routes)
    if sequences.shard is None:
        return routes
    padding = routes.new_full((rows - len(routes), *routes.shape[1:]), UNKNOWN)
    return torch.cat([routes, padding])[sequences.shard.tokens]


def rerouted_share(routes: Routes, sequences: SequenceLayout, num_tokens: int) -> Tensor:
    """Return for each token of a batch the share of layers in which its router chose other experts, [T] fp32."""
    share = routes.rerouted.float().mean(1)  # [rows]
    if not sequences.packed:
        return share[sequences.slots]
    if sequences.shard is None:
        return share
    whole = share.new_zeros(len(sequences.positions)).index_copy(0, sequences.shard.tokens, share)
    return sequences.whole(whole)[:num_tokens]


class TakeRoutes(TorchFunctionMode):
    """Makes the top k among all experts, in the forward pass of a router, the known routes of a layer."""

    def __init__(self, routes: Routes, layer: int, num_experts: int) -> None:
        super().__init__()
        self.routes, self.layer, self.num_experts = routes, layer, num_experts

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = self.routes.experts[:, self.layer]  # [rows, K]
        is_choice = func in (torch.topk, Tensor.topk) and args[0].shape == (len(given), self.num_experts)
        if not is_choice or result.indices.shape != given.shape:
            return result
        own, known = result.indices, given[:, :1] >= 0
        chosen = torch.where(known, given.to(own.dtype), own)
        self.routes.layers.add(self.layer)
        # An assignment, not a sum: when activations are recomputed, it is made again.
        self.routes.rerouted[:, self.layer] = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
        return type(result)((args[0].gather(-1, chosen), chosen))


def prepare_routers(model: PreTrainedModel, family: Family) -> None:
    """Have the routers of a model take routes that are given to its layers, also when activations are recomputed."""
    for number, (layer, router) in enumerate(routers_of(model, family)):
        kind = type(router)
        if not hasattr(kind.forward, "takes_routes"):
            kind.forward = replaying(kind.forward)
        layer.register_forward_pre_hook(partial(hand_over, router, number), with_kwargs=True)


def routers_of(model: nn.Module, family: Family) -> list[tuple[nn.Module, nn.Module]]:
    """Return each layer with experts and its router, in order; none for a family without routers that are known."""
    if not family.router:
        return []
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    pairs = ((layer, part) for layer in layers for part in layer.modules())
    return [(layer, part) for layer, part in pairs if type(part).__name__ == family.router]


def hand_over(
    router: Any, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the router of a layer the routes that the layer got, before the layer runs."""
    routes = kwargs.get(ARGUMENT)
    router.replayed = None if routes is None else (routes, number)
    return args, {name: value for name, value in kwargs.items() if name != ARGUMENT}


def replaying(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward pass of a router, which takes the routes that it was given."""

    @wraps(forward)
    def route(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        replayed = getattr(module, "replayed", None)
        if replayed is None:
            return forward(module, hidden_states, *args, **kwargs)
        routes, layer = replayed
        with TakeRoutes(routes, layer, module.num_experts):
            return forward(module, hidden_states, *args, **kwargs)

    route.takes_routes = True  # type: ignore[attr-defined]
    return route
