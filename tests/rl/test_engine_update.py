"""Weights that reach the engines while the next step trains, where something fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rl.engine_update import EngineUpdate


@pytest.mark.notices(
    "a sync after a failure is waited for and never begins",
    "rl/engine_update.py",
    "        self.outcome.add_done_callback(tell)",
    "        pass",
)
def test_a_sync_does_not_begin_after_a_failure_and_raises_it(monkeypatch):
    monkeypatch.setattr("rlhf_suite.waits._life.limit_s", 5.0)
    loop, first = LoopThread("test"), ValueError("a reward has failed")
    loop.fail(first)
    journal, rollouts = SimpleNamespace(background=None), SimpleNamespace(allow_sync=lambda version: None)
    update = EngineUpdate(None, rollouts, journal, loop)
    with pytest.raises(ValueError, match="a reward has failed"):
        update.start(1, None)
    loop.end(ValueError("the test is over"))
