"""What an engine imports stays: Python does not search it for garbage, and searches all that comes after it."""

from __future__ import annotations

import subprocess
import sys

# A process of its own: what is frozen stays frozen.
PROGRAM = """
import gc
from rlhf_suite.engines.build import import_for_good

searches = []
gc.callbacks.append(lambda phase, info: searches.append(phase))
before = gc.get_freeze_count()
with import_for_good():
    kept = [[number] for number in range(10_000)]
assert not searches, "searched in the block"
assert gc.get_freeze_count() >= before + len(kept), "searched later"
try:
    with import_for_good():
        raise ImportError
except ImportError:
    pass
more = [[number] for number in range(10_000)]
assert searches, "never searched again"
"""


def test_what_an_engine_imports_is_not_searched_for_garbage():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
