"""What the flags of a run name, as encoded items: the one way from sources to data, of every task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rlhf_suite.config.data import DataConfig
from rlhf_suite.data.encode import Encoder, encode_rows
from rlhf_suite.data.row import BadRows
from rlhf_suite.data.rows import Sources, combine, read_rows
from rlhf_suite.errors import UserError

Encoded = TypeVar("Encoded")


def load_items(
    encoder: Encoder[Encoded], sources: Sources, data: DataConfig, seed: int, bad: BadRows
) -> Sequence[Encoded]:
    """Every usable row of the sources as what `encoder` makes of it; what could not be used is counted in `bad`."""
    return combine([load_source(encoder, name, sources, data, bad) for name in sources.names], sources, seed)


def load_source(
    encoder: Encoder[Encoded], name: str, sources: Sources, data: DataConfig, bad: BadRows
) -> Sequence[Encoded]:
    """All items of one source; UserError if there are none."""
    items = list(encode_rows(encoder, read_rows(name, sources), bad, data.dataloader_num_workers))
    if not items:
        raise UserError(f"{sources.flags.dataset}: no usable row in {name!r}. {bad.summary()}".strip())
    return items
