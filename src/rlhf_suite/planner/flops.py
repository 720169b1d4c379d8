"""How many floating-point operations a trained token takes.

A multiplication with a matrix of N weights takes 2N operations per token in the forward pass, 2N for the gradient of
its input, and 2N for that of its weights: 6N for a weight that is trained (Kaplan et al., arXiv:2001.08361, section
2.1), 4N for one that only passes gradients on, as under adapters, and 2N for one of a model that only runs forward.
Attention multiplies queries with keys and probabilities with values: 4 H D operations per layer and attended token in
the forward pass, with H heads of size D, and twice that in the backward pass (Chowdhery et al., arXiv:2204.02311,
appendix B). A token of a causal sequence of length T attends to (T + 1) / 2 tokens on average; the appendix counts
all T. What gradient checkpointing computes again is not counted, as there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """The matrices that a token is multiplied with, the head included but not the look-up of embeddings; and the heads
    of all layers together times their size."""

    trained: int
    frozen: int
    attention: int


def flops_per_token(model: Model, length: int, reference: Model | None = None) -> float:
    """Return the operations per token of a step over causal sequences of `length` tokens. A `reference` runs forward
    alone, over the same tokens."""
    attended = (length + 1) / 2
    step = 6 * model.trained + 4 * model.frozen + 3 * 4 * model.attention * attended
    if reference is None:
        return step
    return step + 2 * (reference.trained + reference.frozen) + 4 * reference.attention * attended
