"""The table of groups under every schedule: no group is lost, trained twice or too old, a batch is always found, and a
run that continues from any point trains on the same. Events come in any order; there are no threads."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import (
    Case,
    World,
    assert_sound,
    by_weight,
    steps_after_the_first,
    stream_case,
    whole_case,
)

from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.rl.schedules import Ahead, Stream, WithTheStep
from rlhf_suite.rl.slots import GroupOrder, SlotTable


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


@pytest.mark.notices(
    "a run that continues with other batches trains on the groups of the earlier ones",
    "rl/slots.py",
    "if not order.continues(state):",
    "if False:",
)
@pytest.mark.parametrize("make_case", [stream_case, whole_case])
def test_a_run_that_continues_with_other_batches_rows_filters_or_fewer_steps_takes_the_batches_of_these(make_case):
    changed = 0
    for seed in range(400):
        draw = random.Random(seed)
        case = replace(make_case(draw), share_rejected=0.0)
        other = replace(make_case(draw), share_rejected=0.0, schedule=case.schedule, chooses_prompts=False)
        order, first = other.order, World(case, by_weight(draw))
        first.run(draw.randint(0, case.order.total_steps - 1))
        step = first.table.step
        if isinstance(case.schedule, Ahead) or step >= order.total_steps:
            order = replace(order, rounds=order.batches, total_steps=max(order.total_steps, step + 1))
        second = first.continue_as(replace(other, order=order)).run()
        sizes = [len(batch) for batch in second.batches]
        if not order.is_filtered or isinstance(case.schedule, Stream):
            assert sizes == [order.size(number) for number in range(step, order.total_steps)], seed
        changed += bool(first.table.groups_to_keep()) and case.order.batches != order.batches
    assert changed > 20, "groups were under way in many of the runs"


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
