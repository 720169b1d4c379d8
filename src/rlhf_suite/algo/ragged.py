"""Between the two layouts: tokens laid end to end [T] with lengths [B], and right-padded rows [B, L]."""

from __future__ import annotations

import torch
from torch import Tensor


def inside(lengths: Tensor) -> Tensor:
    """Which cells of the padded layout hold a token, [B, L] bool; L is the longest length."""
    longest = int(lengths.max()) if len(lengths) else 0
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def pad(values: Tensor, lengths: Tensor, fill: float = 0) -> Tensor:
    """[T] to [B, L], `fill` behind the end of each sequence."""
    cells = inside(lengths)
    return torch.full(cells.shape, fill, dtype=values.dtype, device=values.device).masked_scatter(cells, values)


def unpad(padded: Tensor, lengths: Tensor) -> Tensor:
    """[B, L] to [T]: what `pad` made, undone."""
    return padded[inside(lengths)]
