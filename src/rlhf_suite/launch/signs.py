"""Signs of life of actors, by which the driver tells long work from work that stands still.

An actor counts what it does: forward passes, tensors that it gathers (`waits.sign_of_life`). While it works, a thread
of it writes the count to the key-value store of the Ray cluster, and the driver reads it when it waits. So a policy
update may take hours, and one that hangs is noticed within the limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from rlhf_suite.launch.actor_log import Member
from rlhf_suite.waits import signs_of_life

SHOW_S = 1.0  # between two looks of the actor at its count


def show_signs(log: str, on_sign: Callable[[], object]) -> None:
    """Write the count of this process to the store, under the path of its log, whenever it has changed; call `on_sign`
    then too."""
    from ray.experimental.internal_kv import _internal_kv_put

    def work() -> None:
        shown = signs_of_life()
        while True:
            time.sleep(SHOW_S)
            if (signs := signs_of_life()) != shown:
                shown = signs
                on_sign()
                with suppress(Exception):  # a store that does not answer must not end the actor
                    _internal_kv_put(key_of(log), str(signs), overwrite=True)

    threading.Thread(target=work, name="signs of life", daemon=True).start()


def signs_of(members: Iterable[Member]) -> list[bytes | None]:
    """Return the counts that actors have shown; None for one that shows nothing."""
    from ray.experimental.internal_kv import _internal_kv_get

    with suppress(Exception):
        return [_internal_kv_get(key_of(str(member.log.absolute()))) for member in members]
    return []


def key_of(log: str) -> str:
    """Return the key of an actor, by the absolute path of its log."""
    return f"rlhf_suite/signs/{log}"
