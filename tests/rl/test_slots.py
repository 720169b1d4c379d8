"""The table of groups under every schedule: no group is lost, trained twice or too old, a batch is always found, and a
run that continues from any point trains on the same. Events come in any order; there are no threads."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

    def run(self) -> World:
        self.table: SlotTable[str] = SlotTable(self.case.order)
        for step in range(self.case.order.total_steps):
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
        assert not table.is_at_work, "nothing is made for steps behind the last one"
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


@pytest.mark.notices(
    "a stream begins more groups than its last steps train on",
    "rl/schedules.py",
    "min(most, table.order.before(table.version + self.bound + 1))",
    "most",
)
@pytest.mark.notices(
    "a group may become one step older than the bound",
    "rl/schedules.py",
    "if version + bound <= due",
    "if version + bound < due",
)
def test_no_group_is_older_than_the_bound_lost_or_trained_twice_in_3000_random_schedules(record_property):
    ages: list[int] = []
    for seed in range(3000):
        draw = random.Random(seed)
        world = World(stream_case(draw), by_weight(draw), stop=lambda draw=draw: draw.random() < 0.05).run()
        assert_sound(world)
        ages += [step - version for step, each in enumerate(world.begun_at) for version in each]
    record_property("groups in 3,000 random schedules", len(ages))
    assert max(ages) == 4 and 0 in ages


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_a_stream_is_sound_in_any_order_of_events(seed, data):
    case = stream_case(random.Random(seed))
    world = World(case, lambda events: data.draw(st.sampled_from(events)), stop=lambda: data.draw(st.booleans()))
    assert_sound(world.run())


@pytest.mark.notices(
    "a group that waits for a later step gets older than rollouts are made ahead",
    "rl/schedules.py",
    "if self.needs_round(table) and not order.is_filtered:",
    "if False:",
)
@pytest.mark.notices("a run samples prompts that no step trains on", "rl/slots.py", "end = min(end, last)", "pass")
@pytest.mark.notices(
    "a step trains on groups of the next one, which wait",
    "rl/schedules.py",
    "for index in table.ready if index < table.order.before(table.taken + 1))",
    "for index in table.ready)",
)
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_whole_rollouts_are_the_same_in_any_order_of_events_and_after_any_stop(seed, data):
    case = whole_case(random.Random(seed))
    first = World(case, lambda events: events[0]).run()
    assert_sound(first)
    other = World(case, lambda events: data.draw(st.sampled_from(events)), stop=lambda: data.draw(st.booleans()))
    assert_sound(other.run())
    assert other.batches == first.batches and other.begun_at == first.begun_at
    if not case.order.is_filtered:
        for batch, versions in zip(first.batches, first.begun_at, strict=True):
            assert versions == [version_that_writes(case, index) for index in batch]


def version_that_writes(case: Case, index: int) -> int:
    """Return the weights that write a group without filters: those of the step in which its round begins, or as many
    steps before the last one that the round reaches as rollouts are made ahead."""
    order = case.order
    number, end = order.round_from(index)
    if isinstance(case.schedule, Ahead):
        return max(0, order.batches.number(end - 1) - case.schedule.depth)
    return order.batches.number(order.rounds.rows_before(number))


def test_rollouts_made_ahead_are_those_of_the_step_but_for_their_weights():
    """The same groups, whatever the depth and the rounds, where no filter looks at what older weights have written."""
    for seed in range(200):
        case = whole_case(random.Random(seed))
        if case.order.is_filtered:
            continue
        depth = steps_after_the_first(case.order)
        cases = [replace(case, schedule=it) for it in (WithTheStep(), Ahead(depth=depth), Ahead(depth=depth + 2))]
        plain = replace(case.order, rounds=case.order.batches)
        cases += [replace(case, schedule=it, order=plain) for it in (WithTheStep(), Ahead(depth=1), Ahead(depth=3))]
        first, *others = [World(it, by_weight(random.Random(seed))).run().batches for it in cases]
        assert all(other == first for other in others)


@pytest.mark.notices(
    "a stream does not oversample",
    "rl/schedules.py",
    "table.order.before(table.version + self.run_ahead + 1) + self.surplus",
    "table.order.before(table.version + self.run_ahead + 1)",
)
def test_a_stream_with_more_prompts_in_a_round_has_so_many_more_groups_under_way():
    batches = BatchOrder(100, 4, 0)
    order = GroupOrder(batches, replace(batches, batch_size=6), 20, is_filtered=False)
    for schedule, most in ((Stream(3, 1, 0), 8), (Stream(3, 1, 0, surplus=2), 10), (Stream(3, 1, 0, surplus=99), 16)):
        world = World(Case(schedule, order, 0, 0.0, False, True), lambda events: events[0])
        world.table = SlotTable(order)
        world.advance()
        assert world.table.outstanding == most


@pytest.mark.notices(
    "a group that begins while weights are synced counts as one of the new weights",
    "rl/slots.py",
    "group.begun_at = self.version",
    "group.begun_at = self.step",
)
def test_a_group_that_begins_while_weights_are_synced_has_the_version_before():
    batches = BatchOrder(100, 2, 0)
    table, schedule = SlotTable[str](GroupOrder(batches, batches, 10, False)), Stream(2, 1, 100)

    def begin() -> dict[int, int]:
        while schedule.may_begin(table):
            if table.waiting:
                table.begin()
            else:
                table.open_round(range(len(table.candidates())))
        return table.versions

    assert begin() == dict.fromkeys(range(4), 0)
    for index in (0, 1, 2):
        table.responded(index)
    table.scored(1, "b")
    table.scored(2, "c")
    table.asked = 0
    chosen = schedule.select(table)
    assert chosen == [1, 2]
    table.take(chosen, {})
    table.trained(0)
    table.rejected(0, has_failed=False)
    assert begin() == {3: 0, 4: 0}, "one begins in its place, and no other one"
    table.synced(1)
    assert begin() == {3: 0, 4: 0, 5: 1, 6: 1}


@pytest.mark.notices(
    "a resumed stream forgets what the prompt filter chose",
    "rl/slots.py",
    'for index in state["waiting"]}',
    "for index in ()}",
)
@pytest.mark.notices(
    "a resumed stream forgets the round of the prompt filter",
    "rl/slots.py",
    '"num_taken", "num_rejected", "next"):',
    '"num_taken", "num_rejected"):',
)
def test_a_table_that_continues_goes_on_with_the_round_of_which_the_prompt_filter_has_spoken():
    batches = BatchOrder(100, 1, 0)
    order = GroupOrder(batches, replace(batches, batch_size=4), 10, True)
    table = SlotTable[str](order)
    table.open_round([0, 3])
    table.begin()
    again = SlotTable[str].from_json(order, json.loads(json.dumps(table.to_json())), [])
    assert again.versions == {0: 0} and [*again.waiting] == [3], "1 and 2 were not chosen"
    again.responded(0)
    again.rejected(0, has_failed=False)
    assert again.begin().index == 3 and again.next == 4


@pytest.mark.parametrize("rows", [4, 5])
def test_groups_come_in_the_order_of_a_synchronous_run(rows):
    batches = BatchOrder(rows, 2, 3)
    groups = GroupOrder(batches, batches, 7, is_filtered=False)
    for step in range(7):
        found = [groups.prompt(index) for index in range(groups.before(step), groups.before(step + 1))]
        assert found == [(prompt, step) for prompt in batches.indices(step)]


@pytest.mark.parametrize("rows", [4, 5])
def test_rounds_of_candidates_have_the_prompts_of_their_batches_and_a_stream_of_random_numbers_each(rows):
    batches = BatchOrder(rows, 2, 3)
    order = GroupOrder(batches, replace(batches, batch_size=3), 7, True, stream_by_round=True)
    first = 0
    for number in range(7):
        assert order.round_from(first) == (number, first + len(order.rounds.indices(number)))
        end = order.round_from(first)[1]
        assert [order.prompt(index) for index in range(first, end)] == [
            (p, number) for p in order.rounds.indices(number)
        ]
        first = end


def test_a_transition_that_cannot_be_is_an_error():
    batches = BatchOrder(4, 2, 0)
    table = SlotTable[str](GroupOrder(batches, batches, 2, False))
    table.open_round([0, 1])
    with pytest.raises(KeyError):
        table.responded(0)
    table.begin()
    with pytest.raises(KeyError):
        table.scored(0, "not written")
    with pytest.raises(KeyError):
        table.take([0], {})
