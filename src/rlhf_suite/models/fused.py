"""Liger's Triton kernels for a model's layers (norms, rotary positions, gated MLPs): same numbers, less memory traffic.

Its fused losses stay off: the head here reads log-probs in chunks itself. Experts of a mixture keep their own kernels.
"""

from __future__ import annotations

from importlib.util import find_spec

from transformers import PreTrainedModel

from rlhf_suite.errors import UserError

FLAG = "ds.use_liger_kernel=true"


def fuse_layers(model: PreTrainedModel, device: str) -> None:
    """Swap the layers' computations in place; parameters and their names stay."""
    if device != "cuda":
        raise UserError(f"{FLAG}: its kernels need a GPU, and the run is on {device}. Set ds.use_liger_kernel=false")
    if find_spec("liger_kernel") is None:
        raise UserError(f"{FLAG}: liger-kernel is not installed. Run pip install 'rlhf-suite[liger]'")
    from liger_kernel.transformers import monkey_patch as liger

    kind = model.config.model_type
    if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"{FLAG}: it has no kernels for models of type {kind}. Set ds.use_liger_kernel=false")
    own_mlp = {"swiglu": False} if hasattr(model.config, "num_experts_per_tok") else {}
    liger._apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False, **own_mlp)
