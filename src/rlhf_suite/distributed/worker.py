"""The base of every class whose instances are the ranks of a model. It imports neither Ray nor torch."""

from __future__ import annotations

import gc
import os

from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.launch.address import use_interface_to


class Worker:
    """The base of the classes that run in a group: it knows its rank, and how to meet the other ranks.

    The environment that torch.distributed and DeepSpeed read is set before the `__init__` of a subclass goes on.
    Ray shows each actor its own device only, so the local rank is always 0.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        use_interface_to(rank.host)
        os.environ.update(
            TORCHELASTIC_USE_AGENT_STORE="True",  # torch joins the store at that address and starts none of its own
            RANK=str(rank.number),
            WORLD_SIZE=str(rank.mesh.size),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=rank.host,
            MASTER_PORT=str(rank.port),
        )


def keep_from_collections() -> None:
    """Keep all that exists now out of later searches for garbage: libraries and a model are half a million objects,
    which take 0.4 s a time, while the device waits for its next kernel."""
    gc.unfreeze()  # a model that was kept before may be garbage now
    gc.collect()
    gc.freeze()
