"""Low-rank adapters (Hu et al., arXiv:2106.09685): y = W x + (alpha / rank) B A x, with W frozen and B
zero at first."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_suite.config.declarations.ds import ALL_LINEAR, LoRAConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import LanguageModel, ScalarModel

ADAPTER = "default"


def add_lora(model: LanguageModel | ScalarModel, config: LoRAConfig, seed: int) -> None:
    """Freeze the model and add adapters to its linear layers. A scalar head stays trainable as a whole."""
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    targets: str | list[str] = ALL_LINEAR if config.target_modules == [ALL_LINEAR] else list(config.target_modules)
    scalar = isinstance(model, ScalarModel)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        exclude_modules=list(model.family.unadapted) if targets == ALL_LINEAR else None,
        task_type=TaskType.SEQ_CLS if scalar else TaskType.CAUSAL_LM,
        base_model_name_or_path=model.model.config._name_or_path,
    )
    heads = [name for name in config.target_modules if name in ("lm_head", "score")]
    if heads:
        raise UserError(f"ds.lora.target_modules: {heads[0]} is the head and takes no adapter. Remove it")
    model.requires_grad_(False)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft sees each module
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(settings, model.model, adapter_name=ADAPTER)
        except ValueError as error:
            if config.dropout > 0 and "lora_dropout" in str(error):
                raise UserError(
                    f"ds.lora.dropout={config.dropout}: adapters of a mixture of experts take no dropout. "
                    "Set ds.lora.dropout=0"
                ) from error
            names = sorted(
                {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
            )
            raise UserError(
                f"ds.lora.target_modules={config.target_modules}: the model has none of these modules. "
                f"Choose among its linear layers {', '.join(names)}, or give {ALL_LINEAR}"
            ) from error
    if scalar:
        model.model.score.requires_grad_(True)
    model.lora = settings


def find_adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of peft that stand for modules of the model, by name; none of them lies in another one."""
    adapted: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if is_adapter(module) and not any(parent in adapted for parent in parents(name)):
            adapted[name] = module
    return adapted


def is_adapter(module: nn.Module) -> bool:
    """Return whether a module is one of peft's that stands for another one."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def parents(name: str) -> Iterator[str]:
    """Yield the names of the modules around a dotted name, from the outermost one on."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def base_of(module: nn.Module) -> nn.Module:
    """Return the module of the model that a module of peft stands for."""
    while is_adapter(module):
        module = module.original_module if hasattr(module, "original_module") else module.get_base_layer()  # type: ignore[operator, assignment]
    return module


def merge_tensors(adapter: nn.Module, value: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the plain module that peft makes of an adapter and what it wraps, by their names in it.

    peft merges a copy, so the model stays as it is: merging in place and back again would lose precision in bf16.
    `value` gives the numbers of a parameter in the precision of the merge.
    """
    copied = _copy(adapter, value, {})
    if hasattr(copied, "unload_and_optionally_merge_module"):
        plain = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        copied.merge()
        plain = copied.get_base_layer()
    return dict(list_stored(plain))


def list_stored(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a checkpoint has of a module: its parameters and persistent buffers."""
    for path, submodule in module.named_modules(remove_duplicate=False):
        kept = {
            name: buffer
            for name, buffer in submodule._buffers.items()
            if name not in submodule._non_persistent_buffers_set
        }
        for name, tensor in {**submodule._parameters, **kept}.items():
            if tensor is not None:
                yield f"{path}.{name}".removeprefix("."), tensor


def _copy(module: nn.Module, value: Callable[[Tensor], Tensor], made: dict[int, Any]) -> Any:
    """Return a copy of a module and those in it, with `value` of each parameter and without hooks."""
    if id(module) in made:
        return made[id(module)]
    twin: Any = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    made[id(module)] = twin
    twin._parameters = {n: p if p is None else nn.Parameter(value(p), False) for n, p in module._parameters.items()}
    twin._buffers = dict(module._buffers)
    twin._modules = {n: m if m is None else _copy(m, value, made) for n, m in module._modules.items()}
    if hasattr(module, "merged_adapters"):
        twin.merged_adapters = []
    if type(module).__name__ == "Linear4bit" and is_adapter(module):  # its own merge would round to 4 bits again
        from peft.tuners.lora import Linear

        twin.__class__, twin.fan_in_fan_out = Linear, False
    return twin


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Compute without adapters inside this context. Nothing else changes, in particular not `requires_grad`."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch would also change requires_grad, and so the gradient hooks
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
