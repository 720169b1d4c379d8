"""The tasks that make rollouts: they begin groups, score what the engines write, and hand batches over to the steps.

    prompts -> begin_groups -> engines -> score_groups -> hand_over -> take (by the step)

They run on the event loop of the engines' requests, which alone changes the table of groups (`rl/slots.py`), so there
is not a lock. A schedule says what may happen next (`rl/schedules.py`). What blocks is done in threads of the loop:
rewards, filters, shaping. The first error of a task ends everything on the loop, and is raised in everyone who waits
for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.disk import write_text
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rl.filtering import History
from rlhf_suite.rl.rollout import Rollout, RolloutBuilder
from rlhf_suite.rl.sample_table import has_samples, read_samples, write_samples
from rlhf_suite.rl.samples import ScoredTrajectories, join_groups
from rlhf_suite.rl.sampling import Sampler
from rlhf_suite.rl.schedules import Rest, Schedule, Stream
from rlhf_suite.rl.scoring import REWARDS, Scores
from rlhf_suite.rl.slots import Group, GroupOrder, SlotTable
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.waits import result

T = TypeVar("T")
STATE, REJECTED = "slots.json", "rejected.jsonl"
ENGINES, ROLLOUTS = "engines", "rollouts"  # threads: pauses; all but scores and filters of them


class Rollouts:
    """The rollouts of a run. The thread that trains calls `begin`, `take`, `allow_sync`, `save` and `load`; whoever
    syncs the weights calls `note_sync`. All other methods belong to the loop."""

    def __init__(  # noqa: PLR0913, PLR0917 - one part of the story each
        self,
        schedule: Schedule,
        order: GroupOrder,
        builder: RolloutBuilder,
        sampler: Sampler,
        loop: LoopThread,
        journal: Journal,
        is_beside: bool,
    ) -> None:
        """`is_beside`: groups are made while the models train."""
        self.schedule, self.builder, self.sampler, self.loop = schedule, builder, sampler, loop
        self.journal, self.is_beside = journal, is_beside
        self.rejected_file = journal.folder.rollouts / REJECTED  # one line for each rejected group
        self.table: SlotTable[ScoredTrajectories] = SlotTable(order)
        self.history = History()
        self.responses: list[list[Trajectory]] = []  # groups that nobody scores yet
        self.rollouts: dict[int, Rollout] = {}  # shaped and not yet trained on, by step
        self.changed = asyncio.Event()  # set with each change, and replaced
        self.are_resting = False  # the engines
        self.round_size, self.round_began = 0, 0.0  # groups of the newest round, and the time
        self.phase, self.measured = "", ExitStack()  # of the engines beside the steps, open while it lasts

    def begin(self, step: int) -> None:
        """Start the tasks. The engines have the weights of `step`, the first one to be trained."""
        if self.rejected_file.is_file():  # a run that was killed rejected groups which are made again
            lines = self.rejected_file.read_text(encoding="utf-8").splitlines(keepends=True)
            write_text(self.rejected_file, "".join(lines[: self.table.num_rejected]))
        self.table.version = step
        for task in (self.begin_groups, self.score_groups, self.hand_over):
            self.loop.task(task())

    def take(self, step: int) -> Rollout:
        """Return the shaped samples of a step (0-based), whole groups, and their metrics."""
        rollout = f"the rollout of step {step + 1}"
        reason = self.on_loop(self.wait_for(step, ""), rollout)
        while reason:
            who = "driver" if self.is_beside else None  # else the timeline has the engines and rewards
            with self.journal.phase(reason, who):
                reason = self.on_loop(self.wait_for(step, reason), rollout)
        return self.rollouts.pop(step)

    def allow_sync(self, version: int) -> None:
        """Take note that the weights `version` are trained, and wait until they may be synced."""
        if not self.on_loop(self.note_trained(version), f"step {version} to be noted"):
            with self.journal.phase("waiting_to_sync"):
                self.on_loop(self.wait_to_sync(version), f"the rollouts of the weights before {version}")

    def note_sync(self, version: int) -> None:
        """Take note that the engines have the weights `version`. May be called on any thread but the loop's."""
        if self.on_loop(self.note_arrival(version), f"the weights {version} to be noted"):
            self.sampler.resume()

    def on_loop(self, work: Coroutine[Any, Any, T], awaited: str) -> T:
        """Do work on the loop and wait for its result; `awaited`: its name, for those who wonder why a run waits."""
        return result(self.loop.start(work), awaited, REWARDS, ROLLOUTS)

    async def begin_groups(self) -> None:
        """Begin groups for as long as the run lasts.

        Consumes: prompts in their order, by rounds of candidates.
        Waits for: the schedule (`may_begin`).
        Unblocked by: a step that asks for its rollout, a group that ends, weights that arrive.
        Produces: requests to the engines, and a task for each group that waits for the responses (`write`).
        """
        table = self.table
        for group in table.running.values():  # they were when the checkpoint was written
            self.loop.task(self.write(group))
        with self.measured:
            while True:
                self.measure()
                if not self.schedule.may_begin(table):
                    await self.changed.wait()
                elif not table.waiting:
                    await self.open_round()
                elif self.are_resting and self.schedule.rests == Rest.AFTER_ROUNDS:
                    await self.loop.run_blocking(ENGINES, self.sampler.wake)
                    self.are_resting = False
                else:
                    self.loop.task(self.write(table.begin()))

    async def open_round(self) -> None:
        """Let the filter of prompts choose from the next candidates, and make groups of those."""
        table, filters = self.table, self.builder.filters
        rows = table.candidates()
        places: Sequence[int] = range(len(rows))
        if filters.of_prompts is not None:
            number, _ = table.order.round_from(table.next)
            chosen = partial(filters.choose, rows, self.history.of(rows), number)
            places = await self.loop.run_blocking(ROLLOUTS, chosen)
            table.tally.counts["rollout/prompts_not_chosen"] += len(rows) - len(places)
        table.open_round(places)
        self.round_size, self.round_began = len(places), time.monotonic()

    async def write(self, group: Group[ScoredTrajectories]) -> None:
        """Wait for the responses to a prompt, and pass them on to be scored."""
        prompt = self.builder.filters.prompts[group.prompt]
        samples = await asyncio.wrap_future(self.sampler.start(group.index, prompt, group.stream))
        self.responses.append(samples)
        self.table.responded(group.index)
        if not self.is_beside:
            left = len(self.table.waiting) + len(self.table.running)
            self.journal.show_part("prompts", self.round_size - left, self.round_size, self.round_began)
        self.tell()

    async def score_groups(self) -> None:
        """Score groups for as long as the run lasts.

        Consumes: groups whose responses are written, all that wait at once.
        Waits for: one of them; with a reward model for all of a round, unless groups are a stream.
        Unblocked by: `write`.
        Produces: groups that are ready, and rejected ones with the reason in a file.
        """
        table = self.table
        while True:
            is_written = not (table.waiting or table.running)
            if not self.responses or (self.schedule.scores_whole_rounds and not is_written):
                await self.changed.wait()
                continue
            if is_written and self.schedule.rests == Rest.AFTER_ROUNDS:
                await self.rest()
            groups, self.responses = self.responses, []
            scores = await self.loop.run_blocking(REWARDS, partial(self.builder.score, groups))
            self.sort_out(scores)

    def sort_out(self, scores: Scores) -> None:
        """Keep the groups that are trained on, and reject the others; others begin in their place."""
        table, lines = self.table, list[str]()
        table.tally.samples += sum(group.episodes for group in scores.groups.values())
        table.tally.counts.update(scores.counts)
        for index, group in scores.groups.items():
            if group.samples is not None:
                self.builder.filters.observe(group.samples, self.history)
            if group.samples is not None and not group.objection:
                table.scored(index, group.samples)
                continue
            prompt = table.rejected(index, has_failed=group.samples is None).prompt
            reason = group.objection or "the reward failed"
            lines.append(json.dumps({"group": index, "prompt": prompt, "step": table.step + 1, "reason": reason}))
        if lines:
            self.rejected_file.parent.mkdir(parents=True, exist_ok=True)
            with self.rejected_file.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
        self.tell()

    async def hand_over(self) -> None:
        """Make rollouts of groups for as long as the run lasts.

        Consumes: groups that are ready.
        Waits for: the schedule (`select`).
        Unblocked by: groups that are ready or rejected; in some schedules a step that asks for its rollout.
        Produces: the shaped rollout of each step, for `take`.
        """
        table = self.table
        for step in [*table.batches]:  # of a run that was stopped
            await self.shape(step)
        while True:
            chosen = self.schedule.select(table)
            if chosen is None:
                await self.changed.wait()
                continue
            self.check(chosen)
            step = table.taken
            table.take(chosen, self.schedule.metrics(table, chosen))
            self.tell()  # the next rollout may begin
            if self.schedule.rests != Rest.NEVER:
                await self.rest()
            await self.shape(step)

    def check(self, chosen: Sequence[int]) -> None:
        """End the run if there is nothing to train on, or if too many rewards have failed since the last batch."""
        tally = self.table.tally
        if not chosen and isinstance(self.schedule, Stream):
            raise RunError(self.builder.explain_rejections(tally.rejected, self.rejected_file))
        failures = tally.counts["reward/errors"] + tally.counts["reward/timeouts"]
        has_rewards = bool(chosen) or tally.accepted + tally.objected > 0 or tally.samples == 0
        self.builder.scorer.check_error_rate(failures, tally.samples, has_rewards)
        if not chosen:
            raise RunError(self.builder.explain_empty_step(self.table.taken, tally.rounds, tally.counts))

    async def shape(self, step: int) -> None:
        """Shape the rewards of a batch, and let its step have it."""
        batch = self.table.batches[step]
        groups = [group.samples for group in batch.groups if group.samples is not None]
        self.rollouts[step] = await self.loop.run_blocking(ROLLOUTS, partial(self.builder.shape, groups, batch.metrics))
        self.tell()

    async def wait_for(self, step: int, reason: str) -> str:
        """Wait until the rollout of a step is there, or waits for something else than `reason`; return for what, ""
        when it is there."""
        if self.table.asked != step:
            self.table.asked = step
            self.tell()
        while step not in self.rollouts:
            is_selected = self.table.taken > step or self.schedule.select(self.table) is not None
            if not is_selected and (now := self.schedule.reason(self.table)) != reason:
                return now
            await self.changed.wait()
        return ""

    async def note_trained(self, version: int) -> bool:
        """Take note that the weights `version` are trained; return whether they may be synced."""
        self.table.trained(version - 1)
        self.tell()
        return self.schedule.may_sync(self.table, version)

    async def wait_to_sync(self, version: int) -> None:
        """Wait until the weights `version` may be synced."""
        while not self.schedule.may_sync(self.table, version):
            await self.changed.wait()

    async def note_arrival(self, version: int) -> bool:
        """Take note that the engines have the weights `version`; return whether they must be told to go on."""
        self.table.synced(version)
        must_resume = self.are_resting and self.schedule.rests == Rest.WHILE_TRAINING
        self.are_resting = False  # a sync has taken their memory back
        self.tell()
        return must_resume

    async def rest(self) -> None:
        """Interrupt what the engines write, if they do not rest, and lend their memory to the models."""
        if not self.are_resting:
            self.are_resting = True
            await self.loop.run_blocking(ENGINES, self.sampler.pause)
            self.tell()

    def tell(self) -> None:
        """Wake all tasks that wait for a change."""
        self.measure()
        self.changed.set()
        self.changed = asyncio.Event()

    def measure(self) -> None:
        """Keep the record of what engines and rewards do beside the steps."""
        phase = self.schedule.phase(self.table) if self.is_beside and not self.are_resting else ""
        if phase != self.phase:
            self.phase = phase
            self.measured.close()
            if phase:
                self.measured.enter_context(self.journal.background(phase, None))

    def save(self, folder: Path) -> None:
        """Write the table into the folder of a checkpoint, with the samples that are scored and not yet trained on."""
        state, kept, history = self.on_loop(self.snapshot(), "the groups under way to be listed")
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
        history.save(folder)
        if kept:
            write_samples(folder, join_groups(kept))

    async def snapshot(self) -> tuple[dict[str, Any], list[ScoredTrajectories], History]:
        """Return what a checkpoint has, which does not change with the table."""
        kept = [group.samples for group in self.table.groups_to_keep() if group.samples is not None]
        return self.table.to_json(), kept, self.history.copy()

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        if not (folder / STATE).is_file():
            raise UserError(
                f"{folder} has no {STATE}: its rollouts were saved by an earlier version of the suite. Continue the "
                "run with that version, or begin a new one"
            )
        state, order = json.loads((folder / STATE).read_text(encoding="utf-8")), self.table.order
        kept = read_samples(folder).by_group() if has_samples(folder) else []
        self.table = SlotTable.from_json(order, state, kept)
        self.history = History.load(folder) if order.has_rows_of(state) else History()
        if not order.continues(state):
            self.journal.warn(
                "The flags or the rows of the run have changed which prompts each step takes, so samples that were "
                f"made for later steps are not used. Step {self.table.step + 1} begins with new ones"
            )
