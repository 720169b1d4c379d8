"""Mistakes in when rollouts are made, and in what is said of who was busy."""

from __future__ import annotations

from mutation import Mutation

AHEAD = ("tests/rl/test_schedules.py",)
LENGTHS = ("tests/rl/test_trained_lengths.py",)
TIMELINE = ("tests/tracking/test_timeline.py",)

SCHEDULES = [
    Mutation(
        "a step does not wait for a group that must not get older",
        "rl/stream.py",
        "            if short > len(ready):\n                return None\n",
        "",
        LENGTHS,
    ),
    Mutation(
        "a rollout that is made ahead begins one weight sync too early",
        "rl/schedules.py",
        "self.version < k - self.depth",
        "self.version < k - self.depth - 1",
        AHEAD,
    ),
    Mutation(
        "the overlap is a share of the whole time",
        "tracking/timeline.py",
        "both / least if least",
        "both / window if least",
        TIMELINE,
    ),
    Mutation(
        "each of several requests begins an interval of its own",
        "tracking/timeline.py",
        "if self.count != 1:",
        "if self.count < 1:",
        TIMELINE,
    ),
]
