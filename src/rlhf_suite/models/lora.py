"""Low-rank adapters (Hu et al., arXiv:2106.09685): y = W x + (alpha / rank) B A x, with W frozen and B
zero at first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlhf_suite.config.ds import LoRAConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import LanguageModel, ScalarModel

ADAPTER = "default"


def add_lora(model: LanguageModel | ScalarModel, config: LoRAConfig, seed: int) -> None:
    """Freeze the model and add adapters to its linear layers. A scalar head stays trainable as a whole."""
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    targets: str | list[str] = "all-linear" if config.target_modules == ["all-linear"] else list(config.target_modules)
    scalar = isinstance(model, ScalarModel)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type=TaskType.SEQ_CLS if scalar else TaskType.CAUSAL_LM,
        base_model_name_or_path=model.model.config._name_or_path,
    )
    heads = [name for name in config.target_modules if name in ("lm_head", "score")]
    if heads:
        raise UserError(f"ds.lora.target_modules: {heads[0]} is the head and takes no adapter. Remove it")
    model.requires_grad_(False)
    with torch.random.fork_rng():
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
                f"Choose among its linear layers {', '.join(names)}, or give all-linear"
            ) from error
    if scalar:
        model.model.score.requires_grad_(True)
    model.lora = settings


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return W + scale * B A as a new tensor of W's type, added in fp32.

    `weight` is W [out, in], `down` is A [r, in], `up` is B [out, r]. Merging in place and back again would lose
    precision in bf16. For a stack of experts [E, out, in], peft keeps all A as [E * r, in] and all B as [out, r * E],
    experts innermost.
    """
    if weight.ndim == 2:
        return torch.addmm(weight.float(), up.float(), down.float(), alpha=scale).to(weight.dtype)
    experts = len(weight)
    downs = down.float().unflatten(0, (experts, -1))  # [E, r, in]
    ups = up.float().unflatten(1, (-1, experts)).permute(2, 0, 1)  # [E, out, r]
    return torch.baddbmm(weight.float(), ups, downs, alpha=scale).to(weight.dtype)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
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
