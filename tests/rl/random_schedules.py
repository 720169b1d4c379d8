"""A run of the table of groups whose events come in any order, and what must hold after each of them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.rl.schedules import Ahead, Schedule, Stream, WithTheStep
from rlhf_suite.rl.slots import GroupOrder, SlotTable, State

Event = tuple[str, int]


@dataclass(frozen=True)
class Case:
    """A run: its schedule, the order of its groups, and what becomes of each."""

    schedule: Schedule
    order: GroupOrder
    seed: int
    share_rejected: float
    chooses_prompts: bool
    overlaps: bool  # a step may ask for its batch while its weights are synced

    def is_rejected(self, index: int) -> bool:
        """Return the fate of a group, which depends on nothing else. Each round has one that is accepted, or without
        filters each batch."""
        parts = self.order.rounds if self.order.is_filtered else self.order.batches
        first = parts.rows_before(parts.number(index))
        return index != first and random.Random(f"{self.seed} {index}").random() < self.share_rejected

    def places(self, number: int, count: int) -> list[int]:
        """Return the places of the candidates that the filter of prompts takes."""
        if not self.chooses_prompts:
            return [*range(count)]
        return sorted({0, *random.Random(f"{self.seed} round {number}").sample(range(count), 1 + count // 2)})


@dataclass
class World:
    """A run whose events come in the order that `choose` wants. `stop` says whether it is killed and continues."""

    case: Case
    choose: Callable[[list[Event]], Event]
    stop: Callable[[], bool] = lambda: False
    syncing: int | None = None  # weights that are under way, or wait until they may be
    batches: list[list[int]] = field(default_factory=list)
    begun_at: list[list[int]] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    table: SlotTable[str] = field(init=False)

    def __post_init__(self) -> None:
        self.table = SlotTable(self.case.order)

    def run(self, end: int | None = None) -> World:
        """Train the steps that are left, or those before `end`."""
        for step in range(self.table.step, self.case.order.total_steps if end is None else end):
            self.until(lambda: self.syncing is None or (self.case.overlaps and self.may_sync()))
            assert isinstance(self.case.schedule, Ahead) or self.table.taken == step, "no step has asked"
            self.table.asked = step
            self.until(lambda step=step: self.table.taken > step and self.syncing is None)
            batch = self.table.batches[step].groups
            assert [group.samples for group in batch] == [f"samples {group.index}" for group in batch]
            assert all(group.prompt == self.case.order.prompt(group.index)[0] for group in batch)
            self.batches.append([group.index for group in batch])
            self.begun_at.append([group.begun_at for group in batch])
            self.table.trained(step)
            assert all(group.state == State.TRAINED for group in batch)
            self.syncing = step + 1
        return self

    def until(self, is_over: Callable[[], bool]) -> None:
        self.advance()
        while not is_over():
            if self.stop():
                self.reload()
                self.advance()
            events = self.events()
            assert events, "nothing is under way, and a batch cannot be selected"
            self.happen(*self.choose(events))
            self.advance()

    def advance(self) -> None:
        """Do all that the schedule allows."""
        table, schedule = self.table, self.case.schedule
        while True:
            if schedule.may_begin(table):
                if table.waiting:
                    table.begin()
                else:
                    first, (number, end) = table.next, table.order.round_from(table.next)
                    places = self.case.places(number, end - first)
                    self.left_out |= {*range(first, end)} - {first + place for place in places}
                    table.open_round(places)
            elif (chosen := schedule.select(table)) is not None:
                table.take(chosen, schedule.metrics(table, chosen))
            else:
                return

    def may_sync(self) -> bool:
        return self.syncing is not None and self.case.schedule.may_sync(self.table, self.syncing)

    def events(self) -> list[Event]:
        written = [("respond", index) for index in self.table.running] + [("score", i) for i in self.table.scoring]
        return written + ([("sync", self.syncing or 0)] if self.may_sync() else [])

    def happen(self, name: str, number: int) -> None:
        if name == "respond":
            self.table.responded(number)
        elif name == "sync":
            self.table.synced(number)
            self.syncing = None
        elif self.case.is_rejected(number):
            self.table.rejected(number, has_failed=number % 2 == 0)
            self.rejected.append(number)
        else:
            self.table.scored(number, f"samples {number}")

    def continue_as(self, case: Case) -> World:
        """Return the run that continues from a checkpoint after the newest step with other flags."""
        self.until(lambda: self.syncing is None)
        kept = [group.samples for group in self.table.groups_to_keep()]
        other = World(case, self.choose)
        other.table = SlotTable.from_json(case.order, json.loads(json.dumps(self.table.to_json())), kept)
        return other

    def reload(self) -> None:
        """Continue from what a checkpoint has. What was scored when the run was killed is written again."""
        old, kept = self.table, [group.samples for group in self.table.groups_to_keep()]
        self.table = SlotTable.from_json(old.order, json.loads(json.dumps(old.to_json())), kept)
        assert (self.table.taken, self.table.outstanding) == (old.taken, old.outstanding)
        assert self.table.versions == old.versions and [*self.table.ready] == [*old.ready]
        self.table.asked = old.asked  # the step asks again


def assert_sound(world: World) -> None:
    """Each group is in one place, and each step had whole batches in the order of their prompts."""
    table, order = world.table, world.case.order
    trained = [index for batch in world.batches for index in batch]
    assert len(trained) == len({*trained}) and not {*trained} & {*world.rejected}
    states = {
        State.WAITING: table.waiting,
        State.RUNNING: table.running,
        State.SCORING: table.scoring,
        State.READY: table.ready,
    }
    assert all({group.state for group in groups.values()} <= {state} for state, groups in states.items())
    under_way = {index for groups in states.values() for index in groups}
    under_way |= {group.index for batch in table.batches.values() for group in batch.groups}
    places = [{*trained}, {*world.rejected}, world.left_out, under_way]
    assert sum(map(len, places)) == table.next and set.union(*places) == {*range(table.next)}
    assert all(batch == sorted(batch) and batch for batch in world.batches)
    assert table.num_rejected == len(world.rejected) == len({*world.rejected})
    if not isinstance(world.case.schedule, Stream):
        assert not table.is_at_work, "nothing is made for steps after the last one"
    if isinstance(world.case.schedule, Stream):
        assert [len(batch) for batch in world.batches] == [order.size(step) for step in range(order.total_steps)]
        assert not (table.running or table.scoring or table.ready), "groups began that no step trains on"
    elif not order.is_filtered:
        for step, batch in enumerate(world.batches):
            its_own = range(order.before(step), order.before(step + 1))
            assert batch == [index for index in its_own if index not in world.rejected]
        assert table.next == order.before(order.total_steps), "groups began that no step trains on"
    if (bound := largest_age(world.case)) is not None:
        for step, versions in enumerate(world.begun_at):
            assert max(step - version for version in versions) <= bound


def largest_age(case: Case) -> int | None:
    """Return how many versions old a group may be; None where filters let groups wait for as long as it takes."""
    if isinstance(case.schedule, Stream):
        return case.schedule.bound
    if case.order.is_filtered:
        return None
    return case.schedule.depth if isinstance(case.schedule, Ahead) else steps_after_the_first(case.order)


def steps_after_the_first(order: GroupOrder) -> int:
    """Return how many steps after the first one that takes groups of it a round reaches at most."""
    size, prompts = order.batches.batch_size, order.rounds.batch_size
    return (size - math.gcd(prompts, size) + prompts - 1) // size


def stream_case(draw: random.Random) -> Case:
    bound = draw.randint(0, 4)
    rows, is_filtered = draw.randint(1, 12), draw.random() < 0.5
    batches = BatchOrder(rows, draw.randint(1, min(5, rows)), 0)
    rounds = replace(batches, batch_size=draw.randint(1, rows))
    order = GroupOrder(batches, rounds, draw.randint(1, 12), is_filtered)
    run_ahead = draw.randint(0, bound)
    surplus = 0 if is_filtered else draw.randint(0, (bound - run_ahead) * batches.batch_size)
    schedule = Stream(bound, run_ahead, 10**6, surplus)
    share, chooses = 0.3 * (is_filtered or draw.random() < 0.5), is_filtered and draw.random() < 0.5
    return Case(schedule, order, draw.randint(0, 10**6), share, chooses, overlaps=draw.random() < 0.8)


def whole_case(draw: random.Random) -> Case:
    """A schedule whose rollouts are whole: with the step, or ahead of it."""
    rows, is_filtered, depth = draw.randint(1, 12), draw.random() < 0.5, draw.randint(0, 3)
    batches = BatchOrder(rows, draw.randint(1, min(5, rows)), 0)
    least = 1 if is_filtered else batches.batch_size
    order = GroupOrder(batches, batches, draw.randint(1, 12), is_filtered, stream_by_round=is_filtered)
    sizes = [replace(order, rounds=replace(batches, batch_size=size)) for size in range(least, 3 * rows + 1)]
    # Rounds that reach further than a rollout is made ahead are refused before a run.
    order = draw.choice([it for it in sizes if is_filtered or not depth or steps_after_the_first(it) <= depth])
    share, chooses = 0.4 * (draw.random() < 0.7), is_filtered and draw.random() < 0.5
    schedule = Ahead(draw.randint(1, 6), depth=depth) if depth else WithTheStep(draw.randint(1, 6))
    return Case(schedule, order, draw.randint(0, 10**6), share, chooses, overlaps=depth > 0)


def by_weight(draw: random.Random) -> Callable[[list[Event]], Event]:
    """Return a choice in which a few events take very long."""
    weights: dict[Event, float] = {}
    sigma = draw.uniform(0, 2.5)

    def choose(events: list[Event]) -> Event:
        each = [weights.setdefault(event, draw.lognormvariate(0, sigma)) for event in events]
        return draw.choices(events, each)[0]

    return choose
