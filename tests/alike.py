"""Sequences that begin alike, as the answers to one prompt do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor


def begin_alike(ids: Tensor, lengths: Sequence[int], pairs: Iterable[tuple[int, int, int]]) -> Tensor:
    """Return the tokens [T] of sequences in which, for each (row, other, count), a row begins with the first tokens of
    another."""
    rows = [row.clone() for row in ids.split([*lengths])]
    for row, other, count in pairs:
        rows[row][:count] = rows[other][:count]
    return ids.new_tensor([token for row in rows for token in row.tolist()])
