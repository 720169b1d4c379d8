"""What vLLM's kernels without a GPU do not compute: heads of other sizes, rotary positions of heads, and images whose
tokens see each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import ModelConfig

    Rotated = tuple[Tensor, Tensor | None]


def check_head_size(config: ModelConfig) -> None:
    """Raise ValueError for heads of a size without a CPU kernel, which vLLM would notice only at the first request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    size, backend = config.get_head_size(), CPUMLABackend if config.use_mla else CPUAttentionBackend
    sizes = backend.get_supported_head_sizes()
    if size not in sizes:
        raise ValueError(f"its attention heads have {size} dimensions, and the CPU kernels support {sizes}")


def mend_rotary_positions() -> None:
    """Let the models of this process give queries and keys by head to the rotary positions, too."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = join_heads(RotaryEmbedding.forward_cpu)


def mend_image_attention() -> None:
    """Let the tokens of an image see each other where the model of this process wants it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "rlhf_suite.engines.whole_images.ImageBackend")


def join_heads(rotate: Callable[..., Rotated]) -> Callable[..., Rotated]:
    """Return `rotate` for queries and keys [tokens, heads, dimensions], too. The CPU kernel of vLLM 0.32 reads the last
    dimension as all heads of a token, so it would rotate by the positions of other tokens (LFM2)."""

    @wraps(rotate)
    def rotate_rows(layer: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Rotated:
        rows = [tensor if tensor is None else tensor.reshape(len(tensor), -1) for tensor in (query, key)]
        rotated, rotated_key = rotate(layer, positions, *rows)
        return rotated.view(query.shape), rotated_key if key is None else rotated_key.view(key.shape)  # type: ignore[union-attr]

    return rotate_rows
