"""Preparing a loaded model for training or serving: adapters, frozen parameters, dropout, kernels, offload."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec

from torch import nn
from transformers import PreTrainedModel

from rlhf_suite.config.check.lacking import LIGER_KERNEL, refuse_missing, refuse_without_gpu
from rlhf_suite.config.declarations.ds import FUSED_ON_GPUS, DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import ActorConfig, TrainedModelConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.experts import ExpertBalance
from rlhf_suite.models.forward import LanguageModel, ScalarModel
from rlhf_suite.models.lora import add_lora
from rlhf_suite.models.routing import routers_of

LIGER = "ds.use_liger_kernel=true"


def make_trainable(
    model: LanguageModel | ScalarModel,
    config: TrainedModelConfig,
    lora: LoRAConfig,
    *,
    seed: int = 0,
    section: str = "actor",
) -> None:
    """Set training mode, adapters, frozen parameters, activation checkpointing and MoE load balancing as configured.

    `section` is the section of `config` in error messages.
    """
    model.train()
    if lora.rank > 0:
        add_lora(model, lora, seed)
    freeze_parts(model, config, section)
    if config.gradient_checkpointing_enable:
        if not model.model.supports_gradient_checkpointing:
            name = f"{section}.gradient_checkpointing_enable"
            raise UserError(f"{name}=true: {type(model.model).__name__} does not support it. Set {name}=false")
        model.model.gradient_checkpointing_enable({"use_reentrant": config.gradient_checkpointing_reentrant})
    if config.aux_loss_coef > 0:
        if not hasattr(model.model.config, "num_experts_per_tok"):
            name = f"{section}.aux_loss_coef"
            raise UserError(f"{name}={config.aux_loss_coef}: this model has no experts to balance. Set {name}=0")
        model.balance = ExpertBalance(model.model.config.num_experts_per_tok)


def freeze_parts(model: LanguageModel | ScalarModel, config: TrainedModelConfig, section: str) -> None:
    """Freeze what the flags of a section say."""
    if config.freeze:
        freeze(model.model, config.freeze, f"{section}.freeze")
    if config.freeze_router:
        freeze_routers(model, f"{section}.freeze_router")
    if isinstance(config, ActorConfig) and config.has("freeze_visual_encoder") and config.freeze_visual_encoder:
        assert model.family.images is not None, "checked with the flags"
        tower = [re.escape(name) for name in model.family.images.tower]
        freeze(model.model, tower, f"{section}.freeze_visual_encoder")


def freeze(model: nn.Module, patterns: Sequence[str], flag: str) -> None:
    """Freeze the parameters that a pattern matches.

    A pattern is a regular expression of the whole name of a parameter or of a module around it. A tied matrix is frozen
    under either of its names.

    Raises:
        UserError: a pattern matches nothing, or everything is frozen.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matches = re.compile(rf"(?:{pattern})(?:\..*)?").fullmatch
        matching = [parameter for name, parameter in named if matches(name)]
        if not matching:
            names = ", ".join(sorted({re.sub(r"\.\d+\..*", ".<number>", name) for name, _ in named}))
            raise UserError(f"{flag}: no parameter or module matches {pattern!r}. The model has {names}")
        for parameter in matching:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise UserError(f"{flag}={list(patterns)}: freezes the whole model. Leave something to train")


def freeze_routers(model: LanguageModel | ScalarModel, flag: str) -> None:
    """Freeze the routers of a mixture of experts.

    Raises:
        UserError: it has none that are known.
    """
    routers = routers_of(model.model, model.family)
    if not routers:
        raise UserError(f"{flag}=true: {model.family.title} has no routers that are known here. Set {flag}=false")
    for _, router in routers:
        router.requires_grad_(False)


def fuses_layers(ds: DeepSpeedConfig, kind: str, device: str, *, reads_images: bool) -> bool:
    """Return whether Liger computes layers of a model of a `kind` (model_type in its config.json)."""
    if ds.use_liger_kernel is not None:
        return ds.use_liger_kernel
    if device != "cuda" or reads_images or ds.deepcompile or ds.tensor_parallel_size > 1:
        return False
    return kind in liger_kinds()


def liger_kinds() -> frozenset[str]:
    """Return the kinds of models that Liger has kernels for; none where it is not installed."""
    if find_spec("liger_kernel") is None:
        return frozenset()
    from liger_kernel.transformers import monkey_patch as liger

    return frozenset(liger.MODEL_TYPE_TO_APPLY_LIGER_FN)


def fuse_layers(model: PreTrainedModel, device: str) -> None:
    """Replace the layers' computations in place by Liger's Triton kernels (norms, rotary positions, gated MLPs).

    The numbers are the same with less memory traffic; parameters keep their names. Liger's fused losses stay off, since
    the head reads log-probs in chunks itself, and the experts of a mixture keep their own kernels.
    """
    refuse_without_gpu("ds.use_liger_kernel", True, FUSED_ON_GPUS, device)
    refuse_missing(LIGER, LIGER_KERNEL)
    from liger_kernel.transformers import monkey_patch as liger

    kind = model.config.model_type
    if kind not in liger_kinds():
        raise UserError(f"{LIGER}: it has no kernels for models of type {kind}. Set ds.use_liger_kernel=false")
    own_mlp = {"swiglu": False} if hasattr(model.config, "num_experts_per_tok") else {}
    liger._apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False, **own_mlp)
