"""Tables of groups that a test sets up by hand."""

from __future__ import annotations

from dataclasses import replace

from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.rl.schedules import Schedule
from rlhf_suite.rl.slots import GroupOrder, SlotTable

BATCHES = BatchOrder(100, 2, 0)  # two groups a step
IS_FILTERED = {"is_filtered": True, "stream_by_round": True}


def make_table(total_steps: int = 10, round_size: int = 2, **order: bool) -> SlotTable[str]:
    options = {"is_filtered": False, "stream_by_round": False} | order
    return SlotTable(GroupOrder(BATCHES, replace(BATCHES, batch_size=round_size), total_steps, **options))


def begin_all(table: SlotTable[str], schedule: Schedule) -> list[int]:
    """Begin whatever may begin, and return the groups."""
    begun = []
    while schedule.may_begin(table):
        if table.waiting:
            begun.append(table.begin().index)
        else:
            table.open_round(range(len(table.candidates())))
    return begun


def accept(table: SlotTable[str], *indices: int) -> None:
    for index in indices:
        table.responded(index)
        table.scored(index, f"samples {index}")


def reject(table: SlotTable[str], *indices: int, has_failed: bool = False) -> None:
    for index in indices:
        table.responded(index)
        table.rejected(index, has_failed)


def make_rollout(table: SlotTable[str], schedule: Schedule) -> list[int]:
    """Make the next rollout and hand it over, and return the groups that began."""
    begun = begin_all(table, schedule)
    accept(table, *reversed(begun))
    if begun:
        table.take(schedule.select(table) or [], {})
    return begun
