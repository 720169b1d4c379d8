"""Tensor parallelism: DeepSpeed's AutoTP splits the matrices of each layer over the ranks of the tensor axis.

The plan of transformers for a model says how (`base_model_tp_plan`): a `colwise` matrix [out, in] is split by its
outputs, a `rowwise` one by its inputs, and its product is summed over the ranks. A parameter that is whole but works on
a part of the heads (`replicated_with_grad_allreduce`) has its gradient summed. All others are whole on every rank:
embeddings, norms and heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rlhf_suite.distributed.world import World
from rlhf_suite.errors import UserError

COLUMN, ROW, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
FLAG = "ds.tensor_parallel_size"


def settings(model: nn.Module, config: PretrainedConfig, size: int) -> dict[str, Any]:
    """Return what DeepSpeed's configuration says about the split of `model`, of transformers or a module around one,
    over `size` ranks.

    Raises:
        UserError: the model cannot be split so.
    """
    plan = check_plan(config, size)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = [name for name, _ in model.named_parameters()]
    specs = []
    for style, kind in ((COLUMN, "column"), (ROW, "row"), (SUMMED, "skip")):
        matches = re.compile("|".join(pattern(path) for path, how in plan.items() if how == style) or r"(?!)").search
        matching = [name for name in names if matches(name) and (style != SUMMED or name in trained)]
        if matching:
            exact = "^(" + "|".join(sorted(map(re.escape, matching))) + ")$"
            specs.append({"patterns": [exact], "partition_type": kind, "grad_allreduce": style == SUMMED})
    partition = {"use_default_specs": False, "layer_specs": specs}
    return {"autotp_size": size, "vocab_parallel_lm_head": False, "partition_config": partition}


def pattern(path: str) -> str:
    """Return the regular expression of the weight of a plan's path, such as layers.*.mlp.up_proj."""
    return r"(?:^|\.)" + re.escape(path).replace(r"\*", r"\d+") + r"\.weight$"


def check_plan(config: PretrainedConfig, size: int) -> Mapping[str, str]:
    """Return how each module of the layers is split, by the paths of transformers.

    Raises:
        UserError: the model has no such plan, one with other ways to split, or sizes that `size` does not divide.
    """
    plan = {path: how for path, how in (config.base_model_tp_plan or {}).items() if path.startswith("layers.")}
    other = sorted({*plan.values()} - {COLUMN, ROW, SUMMED})
    sees = config.get_text_config() is not config
    if not plan or other or sees:
        why = f"its plan has {', '.join(other)}" if other else "transformers has no plan for it"
        why = "it reads images" if sees else why
        raise UserError(
            f"{FLAG}={size}: the layers of {config.model_type} cannot be split ({why}; dense models with "
            f"{COLUMN} and {ROW} layers can). Set {FLAG}=1"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, name, None)
        if value is not None and value % size:
            raise UserError(f"{FLAG}={size} does not divide the model's {name}={value}. Set a divisor of it")
    return plan


def is_shard(parameter: Tensor) -> bool:
    """Return whether a parameter is one rank's part of a matrix or bias."""
    return getattr(parameter, "ds_is_replaced_module", False)


@contextmanager
def whole(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Have the given parameters whole on every rank within the block. What is written to split ones is lost.

    Their own memory is put back afterwards, so no part has to be cut out of the whole matrix again.
    """
    shards = [(parameter, parameter.data) for parameter in parameters if is_shard(parameter)]
    for parameter, _ in shards:
        gather: Any = getattr(parameter, "gather_params")  # noqa: B009 - DeepSpeed's, of the layer
        gather([parameter])
    try:
        yield
    finally:
        for parameter, shard in shards:
            parameter.data = shard


def gradient_norm(parameters: Iterable[Tensor], world: World) -> Tensor:
    """Return the norm of all gradients of a model whose matrices are split, the same on every rank. Those of whole
    parameters, which all ranks of the tensor axis have, count once."""
    is_first = world.mesh.tensor_index(world.rank) == 0
    counted = [p.grad for p in parameters if p.grad is not None and (is_first or is_shard(p))]
    return world.sum_of_shards(torch.nn.utils.get_total_norm(counted) ** 2).sqrt()
