"""Shapes of the inputs of losses and estimators, asserted in their first line."""

from __future__ import annotations

from torch import Tensor


def is_like(value: object, tensor: Tensor) -> bool:
    """Return whether a value is a tensor with the shape of another one."""
    return isinstance(value, Tensor) and value.shape == tensor.shape


def same_shape(*tensors: Tensor, dims: int = 1) -> None:
    """Assert that all tensors have one shape of `dims` dimensions: broadcasting would hide a mistake."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    assert len(set(shapes)) == 1 and len(shapes[0]) == dims, shapes
