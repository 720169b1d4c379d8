"""QLoRA (Dettmers et al., arXiv:2305.14314): frozen matrices in 4 bits (nf4, double quantisation), adapters as usual.

A matrix is dequantised for each product, in the model's own precision. Embeddings, norms and heads are not quantised.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from rlhf_suite.config.check.lacking import BITSANDBYTES, refuse_missing

# The entries that bitsandbytes adds to a state dict beside a quantised weight.
STATE = re.compile(r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)$")


def four_bit(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the quantisation settings for `from_pretrained`."""
    refuse_missing("ds.load_in_4bit=true", BITSANDBYTES)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=torch.uint8,
    )


def keep_exact(model: nn.Module) -> None:
    """Prevent a forward pass without gradient from packing the weights for the CPU.

    Packing rounds their scales, so that training and inference would compute with two different models.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 - torch types attributes as modules


def dequantize(weight: Tensor) -> Tensor:
    """Return the matrix that a 4-bit weight stands for, or any other tensor as it is."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    dequantized: Tensor = dequantize_4bit(weight.detach(), state)
    return dequantized
