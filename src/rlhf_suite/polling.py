"""The one loop that waits for what cannot wake its waiter: a file, a port, a lock, another node.

`launch/watch.py` has a loop of its own, since it must import nothing of the suite; the launchers of sweeps have theirs,
since each turn of them ends jobs and starts others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

POLL_S = 0.05


def poll_until(is_met: Callable[[], bool], timeout_s: float = math.inf, poll_s: float = POLL_S) -> bool:
    """Ask `is_met` every `poll_s` seconds until it is true; return False when it is not within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not is_met():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
