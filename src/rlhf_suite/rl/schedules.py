"""When the rollout of each step is made, and with which weights: three rules over the table of groups (`rl/slots.py`).

    may_begin   whether a group begins, or a further round of candidates
    select      the groups of the next batch; None while it is not complete
    may_sync    whether weights that are trained may reach the engines

Step t (from 0) trains version t of the weights into version t + 1. With S = train.async_queue_size and
D = train.async_run_ahead:

    with the step   rollout t begins when step t asks for it
    ahead           rollout k is written by version max(0, k - S), whole: it begins after the sync of this version, and
                    after rollout k - 1 has ended. Version v is synced when no rollout waits to begin with an older one
    stream          a group begins while fewer are outstanding than steps t to t + D take, t being the version of the
                    engines. One that began at version v is trained by step v + S. A sync may fall between any two
                    steps of the engines: unfinished responses go on with the new weights

So the first two give the same numbers each time, whatever the timing, and a run that was killed continues as if nothing
had happened. A stream trains first on the groups that ended first, and drops none but those that a filter or a failed
reward rejects. Its selection always finds a batch: the groups due by d that are left never exceed what the steps up to
d take, since what begins at version t + 1 is due at t + 1 + S, and by then all outstanding groups fit (D <= S).

Rounds may have more prompts than a step trains on (`rollout.vllm_generate_batch_size`). Without filters each step has
the prompts that it has anyway, and takes those that earlier rounds have written. A round that reaches up to step l is
written by version l - S where rollouts are made ahead, so that none of it gets older than S. A stream has no rounds:
the further prompts are as many further groups that are outstanding, but never more than steps t to t + S take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from rlhf_suite.rl.slots import SlotTable

Table = SlotTable[Any]


class Rest(StrEnum):
    """When engines that share their devices with the models stop and lend them their memory."""

    NEVER = "never"
    AFTER_ROUNDS = "after rounds"  # of sampling, before the last of their samples are scored
    WHILE_TRAINING = "while training"  # responses under way are continued after the sync


class Schedule(Protocol):
    """The rules of a schedule, and what it says of a batch."""

    @property
    def rests(self) -> Rest: ...

    @property
    def scores_whole_rounds(self) -> bool:
        """Whether no group is scored before the engines have written all of its round."""
        ...

    def may_begin(self, table: Table) -> bool:
        """Return whether the next group that waits may begin, or a round of candidates where none waits."""
        ...

    def select(self, table: Table) -> list[int] | None:
        """Return the groups of the next batch; None while it is not complete; [] if it never will be."""
        ...

    def may_sync(self, table: Table, version: int) -> bool:
        """Return whether the engines may get the weights `version`."""
        ...

    def phase(self, table: Table) -> str:
        """Return the name of the phase in which engines and rewards are; "" if neither works on a rollout."""
        ...

    def reason(self, table: Table) -> str:
        """Return the name of the phase in which a step waits for its batch."""
        ...

    def metrics(self, table: Table, chosen: Sequence[int]) -> dict[str, float]:
        """Return what is logged of the chosen groups, before they are taken."""
        ...


@dataclass(frozen=True)
class WithTheStep:
    """Each rollout is made when its step asks for it: without filters by a round, unless earlier rounds have reached
    its prompts; with filters by rounds of candidates until a batch is ready, at most `max_rounds`."""

    max_rounds: int = 1
    rests: Rest = Rest.NEVER
    scores_whole_rounds: bool = False

    def is_due(self, table: Table) -> bool:
        """Return whether the next rollout may begin."""
        return table.asked == table.taken

    def needs_round(self, table: Table) -> bool:
        """Return whether the next rollout needs another round of candidates."""
        if table.order.is_filtered:
            return len(table.ready) < table.order.size(table.taken) and table.tally.rounds < self.max_rounds
        return table.next < table.order.before(table.taken + 1)

    def may_begin(self, table: Table) -> bool:
        is_over = not (table.running or table.scoring)
        return bool(table.waiting) or (is_over and self.is_due(table) and self.needs_round(table))

    def select(self, table: Table) -> list[int] | None:
        if table.is_at_work or not self.is_due(table) or self.needs_round(table):
            return None
        if table.order.is_filtered:
            return sorted(table.ready)[: table.order.size(table.taken)]
        return sorted(index for index in table.ready if index < table.order.before(table.taken + 1))

    def may_sync(self, table: Table, version: int) -> bool:
        return True

    def phase(self, table: Table) -> str:
        if table.waiting or table.running:
            return "generation"
        return "waiting_for_reward" if table.scoring else ""

    def reason(self, table: Table) -> str:
        return self.phase(table) or "generation"

    def metrics(self, table: Table, chosen: Sequence[int]) -> dict[str, float]:
        order, tally, result = table.order, table.tally, dict[str, float]()
        if order.is_filtered or order.rounds != order.batches:
            result["rollout/waiting_groups"] = float(len(table.ready) - len(chosen))
        if order.is_filtered:
            result["rollout/filter_rounds"] = float(tally.rounds)
            if sampled := tally.accepted + tally.objected:
                result["rollout/filter_pass_rate"] = tally.accepted / sampled
        return result


@dataclass(frozen=True)
class Ahead(WithTheStep):
    """Each round is made `depth` steps (S) before the last of its groups is trained on."""

    depth: int = 1

    def version(self, table: Table) -> int:
        """Return the weights that write the next rollout; below 0: the first ones."""
        order, last = table.order, table.taken
        if self.needs_round(table) and not order.is_filtered:
            last = order.batches.number(order.round_from(table.next)[1] - 1)
        return last - self.depth

    def is_due(self, table: Table) -> bool:
        return table.taken < table.order.total_steps and table.version >= self.version(table)

    def may_sync(self, table: Table, version: int) -> bool:
        return table.taken >= table.order.total_steps or self.version(table) >= version

    def reason(self, table: Table) -> str:
        return "waiting_for_rollout"


@dataclass(frozen=True)
class Stream:
    """Groups begin one by one, and a step takes those that ended first but for those that must not get older than
    `bound` versions (S)."""

    bound: int
    run_ahead: int  # D
    max_rejected: int  # groups without a batch in between
    surplus: int = 0  # prompts of a round that are more than a batch
    rests: Rest = Rest.NEVER
    scores_whole_rounds: ClassVar[bool] = False  # there are none

    def may_begin(self, table: Table) -> bool:
        most = table.order.before(table.version + self.run_ahead + 1) + self.surplus
        return table.outstanding < min(most, table.order.before(table.version + self.bound + 1))

    def select(self, table: Table) -> list[int] | None:
        if table.asked != table.taken:
            return None
        if len(table.ready) < table.order.size(table.taken):
            chosen = None
        else:
            chosen = select(begun := table.versions, [*table.ready], table.taken, table.order.before, self.bound)
        if chosen is None:
            return [] if table.tally.rejected > self.max_rejected else None
        oldest = min(begun[index] for index in chosen)
        assert oldest >= table.taken - self.bound, f"a group of version {oldest} in step {table.taken}"
        return chosen

    def may_sync(self, table: Table, version: int) -> bool:
        return True

    def phase(self, table: Table) -> str:
        return "generation" if table.running else ""

    def reason(self, table: Table) -> str:
        has_enough = len(table.ready) >= table.order.size(table.taken)
        return "waiting_for_deadline" if has_enough else "waiting_for_batch"

    def metrics(self, table: Table, chosen: Sequence[int]) -> dict[str, float]:
        unfinished = [*table.running, *table.scoring]
        return {
            "async/outstanding": float(len(table.versions) - len(chosen)),
            "async/rejected": float(table.tally.rejected),
            "async/overtaken": float(sum(index < max(chosen) for index in unfinished)),
        }


def select(
    begun: Mapping[int, int], finished: Sequence[int], step: int, total: Callable[[int], int], bound: int
) -> list[int] | None:
    """Return the groups that a step of a stream trains on, so that for every d in step to step + bound the groups due
    by d that it leaves fit into the steps up to d; None while one that must not get older is still running.

    Args:
        begun: the version at which each untrained group began, by index.
        finished: those that have ended, in that order.
        step: the step, which is also the version of the policy.
        total: the number of groups that all steps before a given one take.
        bound: S, the largest age.
    """
    size = total(step + 1) - total(step)
    if len(finished) < size:
        return None
    chosen: list[int] = []
    taken: set[int] = set()
    for due in range(step, step + bound + 1):
        must = [group for group, version in begun.items() if version + bound <= due]
        later = total(due + 1) - total(step + 1)
        short = len(must) - later - sum(group in taken for group in must)
        if short > 0:
            ready = sorted({*must} & {*finished} - taken, key=lambda group: (begun[group], group))
            if short > len(ready):
                return None
            chosen += ready[:short]
            taken.update(chosen)
    chosen += [group for group in finished if group not in taken][: size - len(chosen)]
    return chosen if len(chosen) == size else None
