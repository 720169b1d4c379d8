"""The place of each group of samples, from its prompt to the step that trains on it. No thread, no clock, no file.

    candidate -> WAITING -> RUNNING -> SCORING -> READY -> TRAINED
                                            \\-> REJECTED

Groups have indices in the order of their prompts. Rounds of candidates become groups one after the other; a filter of
prompts may leave candidates out. Version v of the weights is what v steps have trained, and step t (from 0) trains
version t into version t + 1. What may happen next is said by a schedule (`rl/schedules.py`), three rules over this
table; that it happens is the business of `rl/rollout_tasks.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from rlhf_suite.data.sampler import BatchOrder

T = TypeVar("T")  # the samples of a group


class State(StrEnum):
    """The states of a group, and for what it waits there."""

    WAITING = "waiting"  # for its beginning
    RUNNING = "running"  # for the engines
    SCORING = "scoring"  # for its rewards
    READY = "ready"  # for a step
    REJECTED = "rejected"  # a filter objected to it, or a reward failed
    TRAINED = "trained"


@dataclass
class Group(Generic[T]):
    """The samples of one prompt."""

    index: int
    prompt: int  # the row of the prompt
    stream: int  # of random numbers
    begun_at: int = -1  # the version of the weights when it began
    state: State = State.WAITING
    samples: T | None = None  # once they are scored


@dataclass(frozen=True)
class GroupOrder:
    """Which prompt a group answers, which groups are a round of candidates, and how many groups the steps take."""

    batches: BatchOrder  # of the steps
    rounds: BatchOrder  # the same rows, in rounds of candidates
    total_steps: int
    is_filtered: bool  # groups may be left out, so the last step of an epoch is not short
    stream_by_round: bool = False  # the stream of random numbers is the number of the round, not of the batch
    rows: str = ""  # a digest of the contents of the rows

    def prompt(self, index: int) -> tuple[int, int]:
        """Return (row of the prompt, stream of random numbers) of the group `index`."""
        return self.batches.row(index), (self.rounds if self.stream_by_round else self.batches).number(index)

    def round_from(self, index: int) -> tuple[int, int]:
        """Return the number of the round that has the candidate `index`, and the index after its last candidate."""
        number, last = self.rounds.number(index), self.before(self.total_steps)
        end = self.rounds.rows_before(number + 1)
        if not self.is_filtered and index < last:
            end = min(end, last)  # no step would train on the others
        return number, end

    def before(self, step: int) -> int:
        """Return how many groups the steps before `step` take."""
        step = min(step, self.total_steps)
        return step * self.batches.batch_size if self.is_filtered else self.batches.rows_before(step)

    def size(self, step: int) -> int:
        """Return how many groups the step `step` takes."""
        return self.before(step + 1) - self.before(step)

    def to_json(self) -> dict[str, Any]:
        """Return what the numbers of a table depend on, as plain values."""
        more = {"rows": self.rows, "is_filtered": self.is_filtered, "total_steps": self.total_steps}
        return vars(self.batches) | more

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Return whether a table with this order can continue from the `state` of one: with the same batches of the
        same rows, and at least as many steps, for which groups may be under way."""
        before, now = dict(state.get("order", {})), self.to_json()
        return before.pop("total_steps", math.inf) <= now.pop("total_steps") and before == now

    def has_rows_of(self, state: Mapping[str, Any]) -> bool:
        """Return whether the `state` of a table is about the same rows, so that what it says of a prompt holds."""
        return bool(state.get("order", {}).get("rows") == self.rows)


@dataclass
class Tally:
    """What has happened since the last batch was taken."""

    rounds: int = 0  # of candidates
    accepted: int = 0  # groups that became ready
    objected: int = 0  # groups that a filter left out
    failed: int = 0  # groups without a reward
    samples: int = 0  # that were scored
    counts: Counter[str] = field(default_factory=Counter)  # sums of the metrics of scoring and filters

    @property
    def rejected(self) -> int:
        """Return how many groups were rejected, for whatever reason."""
        return self.objected + self.failed

    def to_json(self) -> dict[str, Any]:
        """Return the tally as plain values."""
        return vars(self) | {"counts": dict(self.counts)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Tally:
        """Return the tally of `to_json`."""
        return cls(**{**values, "counts": Counter(values["counts"])})


@dataclass
class Batch(Generic[T]):
    """The groups of a step, in the order of their indices, and the metrics of their rollout."""

    groups: list[Group[T]]
    metrics: dict[str, float]


class SlotTable(Generic[T]):
    """All groups that are neither trained nor rejected, and the transitions between their states."""

    def __init__(self, order: GroupOrder) -> None:
        self.order = order
        self.version = 0  # of the engines' weights
        self.step = 0  # that is trained now, or next: the version of the policy
        self.asked = -1  # the newest step that has asked for its batch
        self.num_taken = self.num_rejected = 0  # groups
        self.next = 0  # the next candidate
        # The groups that no step has taken, by index. Each state has them in the order in which they came to it.
        self.waiting: dict[int, Group[T]] = {}
        self.running: dict[int, Group[T]] = {}
        self.scoring: dict[int, Group[T]] = {}
        self.ready: dict[int, Group[T]] = {}
        self.batches: dict[int, Batch[T]] = {}  # taken and not yet trained, by step
        self.tally = Tally()

    @property
    def versions(self) -> dict[int, int]:
        """Return the version at which each group began that no step has taken, by index."""
        return {index: group.begun_at for index, group in (self.running | self.scoring | self.ready).items()}

    @property
    def taken(self) -> int:
        """Return how many steps have taken their batch."""
        return self.step + len(self.batches)

    @property
    def outstanding(self) -> int:
        """Return how many groups have begun that are trained, or will be unless they are rejected."""
        return self.num_taken + len(self.running) + len(self.scoring) + len(self.ready)

    @property
    def is_at_work(self) -> bool:
        """Return whether a group will be ready, or rejected, without anything new."""
        return bool(self.waiting or self.running or self.scoring)

    def candidates(self) -> list[int]:
        """Return the rows of the prompts of the next round."""
        return [self.order.prompt(index)[0] for index in range(self.next, self.order.round_from(self.next)[1])]

    def open_round(self, places: Sequence[int]) -> None:
        """Make groups of the candidates at `places` of the next round; the others are left out."""
        first, self.next = self.next, self.order.round_from(self.next)[1]
        for index in (first + place for place in places):
            self.waiting[index] = Group(index, *self.order.prompt(index))
        self.tally.rounds += 1

    def begin(self) -> Group[T]:
        """Begin the first group that waits, with the weights that the engines have, and return it."""
        group = move(next(iter(self.waiting)), self.waiting, self.running, State.RUNNING)
        group.begun_at = self.version
        return group

    def responded(self, index: int) -> None:
        """Take note that the engines have written the samples of a group."""
        move(index, self.running, self.scoring, State.SCORING)

    def scored(self, index: int, samples: T) -> None:
        """Take note of the samples of a group that may be trained on."""
        move(index, self.scoring, self.ready, State.READY).samples = samples
        self.tally.accepted += 1

    def rejected(self, index: int, has_failed: bool) -> Group[T]:
        """Leave a group out, and return it: a reward has failed, or a filter objects to it."""
        group = move(index, self.scoring, {}, State.REJECTED)
        self.num_rejected += 1
        self.tally.failed += has_failed
        self.tally.objected += not has_failed
        return group

    def take(self, chosen: Sequence[int], metrics: Mapping[str, float]) -> Batch[T]:
        """Give the chosen groups, which are ready, to the next step that has no batch, with the tally's counts and
        further metrics."""
        batch = Batch([self.ready.pop(index) for index in sorted(chosen)], dict(self.tally.counts) | dict(metrics))
        self.batches[self.taken], self.tally = batch, Tally()
        self.num_taken += len(chosen)
        return batch

    def trained(self, step: int) -> None:
        """Take note that a step is trained."""
        for group in self.batches.pop(step).groups:
            group.state = State.TRAINED
        self.step = step + 1

    def synced(self, version: int) -> None:
        """Take note that the engines have the weights `version`."""
        self.version = version

    def groups_to_keep(self) -> list[Group[T]]:
        """Return the groups whose samples a checkpoint needs, in the order of `from_json`."""
        return [group for batch in self.batches.values() for group in batch.groups] + [*self.ready.values()]

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values, but for the samples of `groups_to_keep`. What is being written or scored
        is made again by a run that continues."""
        return {
            "order": self.order.to_json(),
            "version": self.version,
            "step": self.step,
            "num_taken": self.num_taken,
            "num_rejected": self.num_rejected,
            "next": self.next,
            "batches": [[step, places(batch.groups), batch.metrics] for step, batch in self.batches.items()],
            "ready": places(self.ready.values()),
            "running": sorted(places((self.running | self.scoring).values())),
            "waiting": [*self.waiting],
            "tally": self.tally.to_json(),
        }

    @classmethod
    def from_json(cls, order: GroupOrder, state: Mapping[str, Any], kept: Sequence[T]) -> SlotTable[T]:
        """Return the table of `to_json`. `kept` are the samples of its `groups_to_keep`. Where the order is another one
        than before (`continues`), no group is under way, and the next one is the first that the next step takes."""
        if not order.continues(state):
            return cls.at_step(order, state)
        table, samples = cls(order), iter(kept)

        def ready(index: int, version: int) -> Group[T]:
            return Group(index, *order.prompt(index), version, State.READY, next(samples))

        for name in ("version", "step", "num_taken", "num_rejected", "next"):
            setattr(table, name, state[name])
        for step, groups, metrics in state["batches"]:
            table.batches[step] = Batch([ready(*place) for place in groups], metrics)
        table.asked = table.step - 1
        table.ready = {index: ready(index, version) for index, version in state["ready"]}
        for index, version in state["running"]:
            table.running[index] = Group(index, *order.prompt(index), version, State.RUNNING)
        table.waiting = {index: Group(index, *order.prompt(index)) for index in state["waiting"]}
        table.tally = Tally.from_json(state["tally"])
        return table

    @classmethod
    def at_step(cls, order: GroupOrder, state: Mapping[str, Any]) -> SlotTable[T]:
        """Return a table without groups at the step of `state`. Filtered candidates do not come a second time."""
        table = cls(order)
        table.version, table.step, table.num_rejected = state["version"], state["step"], state["num_rejected"]
        table.asked = table.step - 1
        table.num_taken = table.next = order.before(table.step)
        if order.is_filtered:
            table.next = max(table.next, state["next"])
        return table


def move(index: int, before: dict[int, Group[T]], after: dict[int, Group[T]], state: State) -> Group[T]:
    """Move a group from the ones of a state to those of the next, and return it."""
    group = after[index] = before.pop(index)
    group.state = state
    return group


def places(groups: Iterable[Group[T]]) -> list[list[int]]:
    """Return the index of each group and the version at which it began."""
    return [[group.index, group.begun_at] for group in groups]
