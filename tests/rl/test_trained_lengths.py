"""What a step trains on is as long as what was begun: long groups are waited for, where other rules lose them.

Durations stand for lengths. They are lognormal, so that the longest of 2,000 takes some fifty times the mean.
"""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.rl.schedules import select
from rlhf_suite.rl.slots import GroupOrder

SIZE, STEPS, BOUND, RUN_AHEAD, SIGMA = 16, 125, 4, 1, 1.5
SLOTS = (RUN_AHEAD + 1) * SIZE  # groups that run at once
TRAINING = 0.85 / (RUN_AHEAD + 1)  # of a step, in mean durations of a group: a little less than its generation takes


class Groups:
    """Groups that begin at a version and end after a random time."""

    def __init__(self, seed: int) -> None:
        self.draw, self.now, self.step = random.Random(seed), 0.0, 0
        self.durations: list[float] = []  # of all groups that began
        self.begun: dict[int, int] = {}  # index -> version
        self.ends: dict[int, float] = {}  # of those that run
        self.finished: list[int] = []  # in the order in which they ended

    def begin(self) -> None:
        index = len(self.durations)
        self.durations.append(self.draw.lognormvariate(-(SIGMA**2) / 2, SIGMA))  # of mean 1
        self.begun[index], self.ends[index] = self.step, self.now + self.durations[-1]

    def end_first(self) -> None:
        index = min(self.ends, key=self.ends.__getitem__)
        self.now = max(self.now, self.ends.pop(index))
        self.finished.append(index)

    def train(self, chosen: list[int]) -> None:
        for index in chosen:
            self.finished.remove(index)
            del self.begun[index]
        self.now, self.step = self.now + TRAINING, self.step + 1
        while self.ends and min(self.ends.values()) <= self.now:
            self.end_first()

    def share(self, trained: list[int]) -> float:
        """Return the mean duration of the groups that were trained over that of all that began."""
        return fmean(self.durations[index] for index in trained) / fmean(self.durations)


def streamed(seed: int) -> float:
    """The rule of a run."""
    groups, trained = Groups(seed), list[int]()
    batches = BatchOrder(SIZE * STEPS, SIZE, 0)
    order = GroupOrder(batches, batches, 2 * STEPS, is_filtered=False)  # a run that goes on
    while groups.step < STEPS:
        while len(groups.durations) < order.before(groups.step + RUN_AHEAD + 1):
            groups.begin()
        chosen = select(groups.begun, groups.finished, groups.step, order.before, BOUND)
        if chosen is None:
            groups.end_first()
        else:
            trained += chosen
            groups.train(chosen)
    return groups.share(trained)


def dropped(seed: int) -> float:
    """The usual rule: the groups that ended first are trained, and those that grew too old are left out."""
    groups, trained = Groups(seed), list[int]()
    while len(trained) < SIZE * STEPS:
        while len(groups.ends) < SLOTS:
            groups.begin()
        late = [index for index in groups.finished if groups.step - groups.begun[index] > BOUND]
        groups.finished = [index for index in groups.finished if index not in late]
        if len(groups.finished) < SIZE:
            groups.end_first()
        else:
            chosen = groups.finished[:SIZE]
            trained += chosen
            groups.train(chosen)
    return groups.share(trained)


@pytest.mark.notices(
    "a step does not wait for a group that must not get older",
    "rl/schedules.py",
    "            if short > len(ready):\n                return None\n",
    "",
)
@pytest.mark.parametrize("seed", range(3))
def test_trained_groups_are_as_long_as_those_that_began(seed, record_property):
    share = streamed(seed)
    record_property("mean length of trained groups over that of those that began", float(share))
    assert 0.98 <= share <= 1.02


@pytest.mark.parametrize("seed", range(3))
def test_dropping_late_groups_would_lose_the_long_ones(seed, record_property):
    share = dropped(seed)
    record_property("the same where late groups are dropped", float(share))
    assert 0.2 <= share <= 0.6
