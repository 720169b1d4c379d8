"""The rules of a stream on tables that are set up by hand."""

from __future__ import annotations

import pytest
from small_tables import IS_FILTERED, accept, begin_all, make_table, reject

from rlhf_suite.rl.schedules import Rest, Stream, select


@pytest.mark.notices(
    "one group too many of a stream is outstanding",
    "rl/schedules.py",
    "return table.outstanding < min(",
    "return table.outstanding <= min(",
)
@pytest.mark.notices(
    "groups of a stream begin for the weights that are trained, before the engines have them",
    "rl/schedules.py",
    "table.order.before(table.version + self.run_ahead + 1)",
    "table.order.before(table.step + self.run_ahead + 1)",
)
@pytest.mark.notices(
    "groups that a step has taken are no longer outstanding",
    "rl/slots.py",
    "self.num_taken += len(chosen)",
    "pass",
)
def test_a_stream_runs_so_many_steps_ahead_of_the_weights_of_the_engines():
    table, schedule = make_table(total_steps=3), Stream(bound=2, run_ahead=1, max_rejected=100)
    assert begin_all(table, schedule) == [0, 1, 2, 3], "the groups of steps 0 and 1"
    accept(table, 1, 3)
    table.responded(0)
    assert table.outstanding == 4 and begin_all(table, schedule) == [], "in whatever state they are"
    table.asked = 0
    table.take([1, 3], {})
    table.trained(0)
    assert table.outstanding == 4 and begin_all(table, schedule) == [], "the engines still have version 0"
    table.synced(1)
    assert begin_all(table, schedule) == [4, 5]
    table.synced(3)
    assert begin_all(table, schedule) == [], "there are no more steps"


@pytest.mark.notices(
    "a stream chooses groups before their step asks",
    "rl/schedules.py",
    "if table.asked != table.taken:\n            return None\n        if len",
    "if len",
)
@pytest.mark.notices(
    "groups that are scored count as overtaken only while they are written",
    "rl/schedules.py",
    "unfinished = [*table.running, *table.scoring]",
    "unfinished = [*table.running]",
)
@pytest.mark.notices(
    "samples of a batch are in the order in which they ended",
    "rl/slots.py",
    "for index in sorted(chosen)]",
    "for index in chosen]",
)
def test_a_step_of_a_stream_gets_the_groups_that_ended_first():
    table, schedule = make_table(), Stream(bound=4, run_ahead=2, max_rejected=100)
    begin_all(table, schedule)
    accept(table, 3)
    table.asked = 0
    assert schedule.select(table) is None and schedule.reason(table) == "waiting_for_batch"
    accept(table, 2)
    assert schedule.reason(table) == "waiting_for_deadline", "there are enough"
    accept(table, 5)
    table.responded(0)
    table.asked = -1
    assert schedule.select(table) is None, "no step has asked"
    table.asked = 0
    chosen = schedule.select(table)
    assert chosen == [3, 2]
    metrics = {"async/outstanding": 4, "async/rejected": 0, "async/overtaken": 2}
    assert schedule.metrics(table, chosen) == metrics, "0 and 1, of 0, 1 and 4"
    assert [group.index for group in table.take(chosen, {}).groups] == [2, 3]
    assert schedule.phase(table) == "generation" and schedule.may_sync(table, 1)
    for index in (1, 4):
        table.responded(index)
    assert schedule.phase(table) == "", "only rewards are waited for"
    assert not schedule.scores_whole_rounds and schedule.rests == Rest.NEVER, "unless it is told otherwise"


def test_a_group_may_be_as_old_as_the_bound():
    table, schedule = make_table(), Stream(bound=1, run_ahead=1, max_rejected=100)
    assert begin_all(table, schedule) == [0, 1, 2, 3]
    for step, chosen in enumerate([[0, 1], [2, 3]]):
        assert table.order.size(step) == 2
        accept(table, *chosen)
        table.asked = step
        assert schedule.select(table) == chosen
        table.take(chosen, {})
        table.trained(step)
        assert begin_all(table, schedule) == [], "the engines do not get the weights, so nothing gets older"


@pytest.mark.notices(
    "a stream that rejects everything goes on for ever",
    "rl/schedules.py",
    "return [] if table.tally.rejected > self.max_rejected else None",
    "return None",
)
def test_a_stream_ends_when_it_has_rejected_too_many_groups_without_a_batch():
    table, schedule = make_table(**IS_FILTERED), Stream(bound=1, run_ahead=1, max_rejected=3)
    table.asked = 0
    begin_all(table, schedule)
    accept(table, 0)
    reject(table, 1, 2, has_failed=True)
    reject(table, 3)
    assert schedule.select(table) is None, "three are allowed"
    reject(table, *begin_all(table, schedule)[:1])
    assert schedule.select(table) == []
    accept(table, 5)
    assert schedule.select(table) == [0, 5], "a batch is better than an end"


def total(step: int) -> int:
    return 2 * step


@pytest.mark.notices(
    "of groups that must not get older, those that ended first are trained on, not the oldest",
    "rl/schedules.py",
    "key=lambda group: (begun[group], group)",
    "key=finished.index",
)
@pytest.mark.notices(
    "the steps up to a deadline have room for one batch more",
    "rl/schedules.py",
    "later = total(due + 1) - total(step + 1)",
    "later = total(due + 1) - total(step)",
)
def test_groups_that_fit_into_no_later_step_are_trained_on_now():
    """Four groups began at version 0 and must not be older than 1: two of them fit into step 1, so step 0 takes two."""
    begun = dict.fromkeys(range(4), 0)
    assert select(begun, [3, 2, 1, 0], 0, total, bound=1) == [0, 1]
    assert select(begun, [3, 2], 0, total, bound=1) == [2, 3], "any two of them"
    assert select(begun, [3], 0, total, bound=1) is None
    assert select(begun, [3, 2, 1, 0], 0, total, bound=2) == [3, 2], "all of them fit into steps 1 and 2"
    assert select({0: 0, 1: 0, 2: 1, 3: 1}, [2, 3, 1], 1, total, bound=1) is None, "0 would be 2 versions old in step 2"
    assert select({0: 0, 2: 1, 3: 1, 4: 1}, [4, 2, 0], 1, total, bound=1) == [0, 2], "one of 2, 3 and 4 is due as well"
    assert select({0: 0, 2: 1, 3: 1}, [3, 2, 0], 1, total, bound=1) == [0, 3]
    begun = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}  # one of the first three is due, and two of all six
    assert select(begun, [5, 4, 3, 2, 1, 0], 1, total, bound=2) == [0, 1]
