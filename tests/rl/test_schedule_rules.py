"""The rules of each schedule on tables that are set up by hand: what may begin, what a step gets, and when the engines
get weights."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from small_tables import BATCHES, IS_FILTERED, accept, begin_all, make_rollout, make_table, reject

from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.rl.schedules import Ahead, Stream, WithTheStep
from rlhf_suite.rl.slots import GroupOrder, SlotTable, State, Tally


def test_a_new_table_is_at_the_first_step_and_nothing_has_happened():
    table = make_table()
    assert (table.version, table.step, table.asked, table.taken, table.next) == (0, 0, -1, 0, 0)
    assert (table.num_taken, table.num_rejected, table.outstanding, table.is_at_work) == (0, 0, 0, False)
    nothing = dict.fromkeys(("rounds", "accepted", "objected", "failed", "samples"), 0) | {"counts": {}}
    assert table.tally.to_json() == Tally().to_json() == nothing


@pytest.mark.parametrize(("by_round", "streams"), [(False, [0, 0, 1, 1, 2, 2]), (True, [0, 0, 0, 1, 1, 1])])
def test_candidates_are_the_prompts_of_the_batches_and_groups_have_a_stream_of_random_numbers(by_round, streams):
    """Rounds of three candidates, of which the filter of prompts takes the first and the last."""
    table = make_table(round_size=3, stream_by_round=by_round)
    prompts = [prompt for step in range(3) for prompt in BATCHES.indices(step)]
    assert [table.order.prompt(index) for index in range(6)] == list(zip(prompts, streams, strict=True))
    for first in (0, 3):
        assert table.candidates() == prompts[first : first + 3]
        table.open_round([0, 2])
        assert [(group.index, group.prompt, group.stream) for group in table.waiting.values()] == [
            (index, prompts[index], streams[index]) for index in (0, 2, 3, 5) if index < first + 3
        ]
    assert table.tally.rounds == 2 and table.is_at_work


@pytest.mark.notices(
    "a rollout begins before its step asks for it",
    "rl/schedules.py",
    "return table.asked == table.taken",
    "return True",
)
@pytest.mark.notices(
    "a round of candidates begins while groups of the one before are scored",
    "rl/schedules.py",
    "is_over = not (table.running or table.scoring)",
    "is_over = not table.running",
)
@pytest.mark.notices(
    "a step gets its batch while groups of its round are written",
    "rl/schedules.py",
    "if table.is_at_work or not self.is_due(table)",
    "if not self.is_due(table)",
)
@pytest.mark.notices(
    "groups begin in any order", "rl/slots.py", "next(iter(self.waiting))", "next(reversed(self.waiting))"
)
def test_a_rollout_begins_when_its_step_asks_and_has_rounds_until_it_is_full():
    table, schedule = make_table(round_size=3, **IS_FILTERED), WithTheStep(max_rounds=3)
    assert begin_all(table, schedule) == [] and schedule.select(table) is None, "no step has asked"
    table.asked = 0
    assert begin_all(table, schedule) == [0, 1, 2]
    accept(table, 2, 0)
    assert begin_all(table, schedule) == [] and schedule.select(table) is None, "group 1 is written"
    table.responded(1)
    assert begin_all(table, schedule) == [] and schedule.select(table) is None, "group 1 is scored"
    table.rejected(1, has_failed=False)
    assert begin_all(table, schedule) == [] and schedule.select(table) == [0, 2]
    table.take([0, 2], {})
    table.asked = 1
    assert begin_all(table, schedule) == [3, 4, 5]
    reject(table, 3)
    accept(table, 4)
    table.responded(5)
    assert begin_all(table, schedule) == [], "group 5 is scored, and may be the one that is missing"
    table.rejected(5, has_failed=False)
    assert schedule.select(table) is None, "one group is missing"
    assert begin_all(table, schedule) == [6, 7, 8] and schedule.may_sync(table, 1)


@pytest.mark.notices(
    "a rollout has rounds of candidates without end",
    "rl/schedules.py",
    "len(table.ready) < table.order.size(table.taken) and table.tally.rounds < self.max_rounds",
    "len(table.ready) < table.order.size(table.taken)",
    limit_s=60,
)
@pytest.mark.notices(
    "the counts of a batch are those of all batches before",
    "rl/slots.py",
    "self.batches[self.taken], self.tally = batch, Tally()",
    "self.batches[self.taken] = batch",
)
def test_a_rollout_has_at_most_so_many_rounds():
    table, schedule = make_table(round_size=3, **IS_FILTERED), WithTheStep(max_rounds=2)
    for step in range(2):
        table.asked = step
        for number in range(2):
            first = 3 * (2 * step + number)
            assert begin_all(table, schedule) == [first, first + 1, first + 2]
            reject(table, first, first + 1)
            reject(table, first + 2, has_failed=True)
        assert begin_all(table, schedule) == [] and schedule.select(table) == []
        assert (table.tally.objected, table.tally.failed, table.tally.rejected) == (4, 2, 6)
        table.take([], {})
    assert table.num_rejected == 12


@pytest.mark.notices(
    "a rollout takes the groups that ended first",
    "rl/schedules.py",
    "return sorted(table.ready)[: table.order.size(table.taken)]",
    "return [*table.ready][: table.order.size(table.taken)]",
)
@pytest.mark.notices(
    "groups of which a reward failed count against the filter",
    "rl/schedules.py",
    "if sampled := tally.accepted + tally.objected:",
    "if sampled := tally.accepted + tally.rejected:",
)
def test_a_step_takes_the_first_groups_and_leaves_others_for_the_next_and_says_so():
    table, schedule = make_table(round_size=5, **IS_FILTERED), WithTheStep(max_rounds=9)
    table.asked = 0
    begin_all(table, schedule)
    accept(table, 4, 2, 0)
    reject(table, 1)
    reject(table, 3, has_failed=True)
    chosen = schedule.select(table)
    assert chosen == [0, 2]
    metrics = schedule.metrics(table, chosen)
    assert metrics == {
        "rollout/filter_rounds": 1,
        "rollout/waiting_groups": 1,
        "rollout/filter_pass_rate": 3 / 4,
    }, "a group without a reward is not one that the filter saw"
    table.tally.counts["rollout/prompts_not_chosen"] = 7
    assert table.take(chosen, metrics).metrics == metrics | {"rollout/prompts_not_chosen": 7}
    table.asked = 1
    assert schedule.metrics(table, []) == {"rollout/filter_rounds": 0, "rollout/waiting_groups": 1}
    assert begin_all(table, schedule) == [5, 6, 7, 8, 9]
    assert WithTheStep().metrics(make_table(), []) == {}, "without filters there is nothing to say"


@pytest.mark.notices(
    "a wait for rewards is one for the engines",
    "rl/schedules.py",
    'return "waiting_for_reward" if table.scoring else ""',
    'return "generation" if table.scoring else ""',
)
def test_a_rollout_with_its_step_is_in_the_phase_of_what_it_waits_for():
    table, schedule = make_table(), WithTheStep()
    assert (schedule.phase(table), schedule.reason(table)) == ("", "generation")
    table.open_round([0, 1])
    assert schedule.phase(table) == "generation"
    begin_all(table, schedule)
    assert schedule.phase(table) == "generation"
    table.responded(0)
    assert schedule.phase(table) == "generation", "group 1 is written"
    table.responded(1)
    assert (schedule.phase(table), schedule.reason(table)) == ("waiting_for_reward", "waiting_for_reward")
    assert Ahead().reason(table) == "waiting_for_rollout"


@pytest.mark.notices(
    "rollouts are made for steps after the last one",
    "rl/schedules.py",
    "return table.taken < table.order.total_steps and table.version",
    "return table.version",
)
@pytest.mark.notices(
    "the last weights wait for rollouts that nobody makes",
    "rl/schedules.py",
    "return table.taken >= table.order.total_steps or self.version(table) >= version",
    "return self.version(table) >= version",
)
@pytest.mark.notices(
    "weights reach the engines while the rollout before is written",
    "rl/schedules.py",
    "return table.taken >= table.order.total_steps or self.version(table) >= version",
    "return True",
)
def test_rollouts_are_made_so_many_steps_ahead_and_none_behind_the_last_step():
    table, schedule = make_table(total_steps=4), Ahead(depth=2)
    assert [make_rollout(table, schedule) for _ in range(2)] == [[0, 1], [2, 3]]
    assert not schedule.may_sync(table, 1), "rollout 2 is written by version 0"
    assert [make_rollout(table, schedule) for _ in range(2)] == [[4, 5], []]
    assert [schedule.may_sync(table, version) for version in (1, 2)] == [True, False]
    table.synced(1)
    assert [make_rollout(table, schedule) for _ in range(2)] == [[6, 7], []]
    assert [schedule.may_sync(table, version) for version in (2, 3, 4)] == [True, True, True]
    table.synced(4)
    assert make_rollout(table, schedule) == [] and schedule.select(table) is None
    assert [[group.begun_at for group in table.batches[step].groups] for step in range(4)] == [
        [0, 0],
        [0, 0],
        [0, 0],
        [1, 1],
    ]


@pytest.mark.notices(
    "with filters the last step of an epoch is short",
    "rl/slots.py",
    "return step * self.batches.batch_size if self.is_filtered else",
    "return",
)
@pytest.mark.notices(
    "a stream begins groups for steps after the last one",
    "rl/slots.py",
    "step = min(step, self.total_steps)",
    "step = min(step, step)",
)
@pytest.mark.parametrize(("is_filtered", "expected"), [(False, [0, 2, 4, 5, 7, 7]), (True, [0, 2, 4, 6, 8, 8])])
def test_steps_take_batches_up_to_the_last_step(is_filtered, expected):
    """5 rows in batches of 2: the third step of an epoch has one row, but for filters."""
    batches = BatchOrder(5, 2, 0)
    order = GroupOrder(batches, batches, total_steps=4, is_filtered=is_filtered)
    assert [order.before(step) for step in range(6)] == expected


@pytest.mark.notices(
    "a checkpoint forgets the batches that wait for their steps",
    "rl/slots.py",
    "[group for batch in self.batches.values() for group in batch.groups] + [*self.ready.values()]",
    "[*self.ready.values()]",
)
@pytest.mark.notices(
    "groups that wait for their rewards are lost when a run continues",
    "rl/slots.py",
    "sorted(places((self.running | self.scoring).values()))",
    "sorted(places(self.running.values()))",
)
@pytest.mark.notices(
    "a continued run gives the batches that wait to steps once more",
    "rl/slots.py",
    "return self.step + len(self.batches)",
    "return self.step",
)
@pytest.mark.notices(
    "groups that were written again by a continued run count as begun with its weights",
    "rl/slots.py",
    "table.running[index] = Group(index, *order.prompt(index), version, State.RUNNING)",
    "table.running[index] = Group(index, *order.prompt(index), table.version, State.RUNNING)",
)
@pytest.mark.notices(
    "batches that were trained are kept",
    "rl/slots.py",
    "in self.batches.pop(step).groups:",
    "in self.batches[step].groups:",
)
@pytest.mark.notices(
    "a continued run counts the rounds of its rollout from the start",
    "rl/slots.py",
    'table.tally = Tally.from_json(state["tally"])',
    "table.tally = Tally()",
)
def test_a_table_that_continues_has_every_group_where_it_was():
    """Step 0 is trained, the batch of step 1 waits, and groups of versions 0 and 1 are in each state."""
    table, schedule = make_table(), Stream(bound=4, run_ahead=4, max_rejected=100)
    begin_all(table, schedule)
    accept(table, 0, 5, 2, 1, 7)
    reject(table, 3)
    for step, chosen in enumerate([[0, 5], [1, 2]]):
        table.asked = step
        table.take(chosen, {"a metric": 0.5})
    table.trained(0)
    table.synced(1)
    table.open_round([0, 1])
    table.begin()
    table.responded(4)
    kept = [group.samples for group in table.groups_to_keep()]
    assert kept == ["samples 1", "samples 2", "samples 7"]
    again = SlotTable[str].from_json(table.order, json.loads(json.dumps(table.to_json())), kept)
    assert vars(again.batches[1].groups[0]) == vars(table.batches[1].groups[0]) and again.batches == table.batches
    assert (again.ready, again.waiting) == (table.ready, table.waiting)
    assert again.running == {index: replace(group, state=State.RUNNING) for index, group in running(table).items()}
    assert {group.begun_at for group in again.running.values()} == {0, 1} and not again.scoring
    for name in ("version", "step", "taken", "num_taken", "num_rejected", "next", "tally"):
        assert getattr(again, name) == getattr(table, name), name
    assert again.asked == 0, "the step that was trained now has not asked yet"


def running(table: SlotTable[str]) -> dict[int, object]:
    """Return the groups that a run which continues has written again."""
    return dict(sorted((table.running | table.scoring).items()))
