"""Rollouts as a stream of groups: partial rollouts, with a bound on staleness that holds by construction.

Version v of the weights is what v steps have trained. Groups have indices in the order in which they begin, which is
the order of prompts of a synchronous run, with the same seeds. With S = train.async_queue_size and
D = train.async_run_ahead:

    admission   a group begins while fewer groups are outstanding than steps t to t + D take, t being trained now
    deadline    a group that began at version v is trained by step v + S
    selection   step t takes finished groups in the order in which they ended, but so that for every d in t to t + S the
                groups due by d that it leaves fit into steps t + 1 to d; it waits for a group only if that needs one

A weight sync falls between two steps of the engines: unfinished responses go on with the new weights, and each token
has its version. It may be under way while step t + 1 trains: a group that begins meanwhile begins at version t, and
admission is that of step t. Where engines and models share their devices, the engines pause as soon as a batch can be
selected, and unfinished responses are continued from their tokens after the sync: all else is the same.

No group is dropped but those that a filter or a failed reward rejects, and `rejected.jsonl` in the folder of
rollouts has those. Selection always finds a batch: the groups due by d that are left never exceed what the steps up to
d take, since what begins at version t + 1 is due at t + 1 + S, and by then all outstanding groups fit (D <= S).
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.trajectory import EpisodeRows, Trajectory
from rlhf_suite.disk import write_text
from rlhf_suite.errors import RunError
from rlhf_suite.rl.filtering import History
from rlhf_suite.rl.rollout import RolloutBuilder
from rlhf_suite.rl.sample_table import read_samples, write_samples
from rlhf_suite.rl.samples import ScoredTrajectories, joined
from rlhf_suite.rl.schedules import CLOSING_S, Rollout
from rlhf_suite.waits import Shared

REJECTED = "rejected.jsonl"
SAMPLES = "samples"
THREAD = "rewards"


def select(
    begun: Mapping[int, int], finished: Sequence[int], step: int, total: Callable[[int], int], bound: int
) -> list[int] | None:
    """Return the groups that a step trains on, or None while one that must not get older is still running.

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


@dataclass(frozen=True)
class GroupOrder:
    """Which prompt a group answers, and how many groups the steps take."""

    order: BatchOrder
    total_steps: int
    whole_batches: bool  # with filters: the last step of an epoch is not short

    def prompt(self, index: int) -> tuple[int, int]:
        """Return (index of the prompt, stream of random numbers) of the group `index`."""
        epoch, row = divmod(index, self.order.num_rows)
        step, place = divmod(row, self.order.batch_size)
        step += epoch * self.order.steps_per_epoch
        return self.order.indices(step)[place], step

    def before(self, step: int) -> int:
        """Return how many groups the steps before `step` take."""
        step = min(step, self.total_steps)
        if self.whole_batches:
            return step * self.order.batch_size
        epoch, batch = divmod(step, self.order.steps_per_epoch)
        return epoch * self.order.num_rows + min(batch * self.order.batch_size, self.order.num_rows)


class Stream(Shared):
    """A schedule of single groups. Groups end on other threads; `changed` guards all that they touch.

    The user's filters run without that lock: while they think, finished groups are taken and responses come in. What
    they say takes effect under it, with the record of scores, so that a checkpoint has both or neither.
    """

    def __init__(
        self,
        builder: RolloutBuilder,
        order: GroupOrder,
        bound: int,
        run_ahead: int,
        folder: Path,
        pauses: bool = False,
    ) -> None:
        super().__init__()
        self.pauses, self.is_paused = pauses, False  # whether the engines stop while the models train, and do so now
        self.builder, self.order, self.bound, self.run_ahead = builder, order, bound, run_ahead
        self.rejected_file = folder / REJECTED
        self.step = 0  # the step that is trained now, and the version of the policy
        self.version = 0  # of the engines' weights: one less than the policy's while a sync is under way
        self.next = 0  # groups that began, and those whose prompts the filter of prompts did not choose
        self.rejected = self.skipped = 0  # of them those that were rejected, and those that did not begin
        self.round_end = 0  # behind the candidates that the filter of prompts has seen
        self.chosen: set[int] = set()  # of the last round of candidates
        self.is_choosing = False  # a thread asks the filter of prompts
        self.begun: dict[int, int] = {}  # index -> version, of groups that are neither trained nor rejected
        self.unscored: list[list[Trajectory]] = []
        self.finished: dict[int, ScoredTrajectories] = {}  # in the order in which they ended
        self.counts: Counter[str] = Counter()  # of scoring, since the last step
        self.rejected_since = 0
        self.is_closed = False
        self.scoring = threading.Thread()
        self.generating = ExitStack()  # open while the engines work
        self.is_generating = False

    def begin(self, step: int) -> None:
        self.forget_rejections()
        with self.changed:
            self.step = self.version = step
            for index in sorted({*self.begun} - {*self.finished}):  # they were running when the checkpoint was written
                self.start(index)
            self.dispatch()
        self.scoring = threading.Thread(target=self.score, name=THREAD, daemon=True)
        self.scoring.start()

    def forget_rejections(self) -> None:
        """Remove what a run wrote about groups that it rejected after the checkpoint: they are made again."""
        if self.rejected_file.is_file():
            lines = self.rejected_file.read_text().splitlines(keepends=True)
            write_text(self.rejected_file, "".join(lines[: self.rejected]))

    def dispatch(self) -> None:
        """Begin groups as far as admission allows. While one thread asks the filter of prompts, groups are begun by it
        alone."""
        while not self.is_choosing and self.may_begin:
            if self.next >= self.round_end:
                self.choose()
                continue
            index, self.next = self.next, self.next + 1
            if index in self.chosen:
                self.start(index)
            else:
                self.skipped += 1

    @property
    def may_begin(self) -> bool:
        is_over = self.is_closed or self.failure is not None
        return self.outstanding < self.order.before(self.version + self.run_ahead + 1) and not is_over

    @property
    def outstanding(self) -> int:
        """The groups that are trained, or will be unless they are rejected."""
        return self.next - self.rejected - self.skipped

    def choose(self) -> None:
        """Ask the filter of prompts which groups of the next round of candidates begin."""
        first, size = self.next, self.builder.rounds_order.batch_size
        candidates = [self.order.prompt(first + place)[0] for place in range(size)]
        history = self.builder.state.history.copy()
        with self.unlocked() if self.builder.algo.prompt_filter is not None else nullcontext():
            places = self.builder.filters.chosen(candidates, history, first // size)
        self.builder.count_chosen(candidates, places, self.counts)
        self.round_end, self.chosen = first + size, {first + place for place in places}

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Leave the lock to other threads while the filter of prompts chooses."""
        self.is_choosing = True
        self.changed.notify_all()
        self.changed.release()
        try:
            yield
        finally:
            self.changed.acquire()  # no-limit: nobody waits with this lock
            self.is_choosing = False

    def measure(self) -> None:
        """Keep the record of whether the engines work."""
        works = len(self.begun) > len(self.finished) and not self.is_paused
        if works and not self.is_generating:
            self.generating.enter_context(self.builder.phase("generation", None))
        elif self.is_generating and not works:
            self.generating.close()
        self.is_generating = works

    def start(self, index: int) -> None:
        self.begun[index] = self.version
        self.measure()
        prompt, stream = self.order.prompt(index)
        self.builder.sampler.start(index, self.builder.prompts[prompt], stream).add_done_callback(self.generated)

    def generated(self, group: Future[list[Trajectory]]) -> None:
        """Hand the samples of a group to the thread that scores."""
        with self.changed:
            if (error := group.exception()) is not None:
                self.failure = self.failure or error
            else:
                self.unscored.append(group.result())  # no-limit: it is done
            self.changed.notify_all()

    def score(self) -> None:
        """Score the groups that have ended, all that wait at once, until the stream is closed."""
        while True:
            with self.changed:
                while not self.unscored and not self.is_closed:
                    self.changed.wait()  # no-limit: it has nothing to do until a group has ended
                if self.is_closed:
                    return
                groups, self.unscored = self.unscored, []
            try:
                with self.builder.phase("reward", "rewards"):
                    samples = [t for group in groups for t in group]
                    scored, counts = self.builder.scorer.score(samples, is_part=True)
                self.sort_out(
                    {group[0].group: group for group in groups},
                    scored,
                    counts | {SAMPLES: len(EpisodeRows.of(samples))},
                )
            except BaseException as error:  # whatever it is, the driver must not wait for ever
                self.fail(error)
                return

    def sort_out(
        self, groups: dict[int, list[Trajectory]], scored: ScoredTrajectories, counts: Mapping[str, float]
    ) -> None:
        """Keep the groups that are trained on, and reject the others."""
        by_index = {group.trajectories[0].group: group for group in scored.by_group()}
        objections = {index: self.builder.filters.objection(group) for index, group in by_index.items()}
        with self.changed:
            self.counts.update(counts)
            for index, trajectories in groups.items():
                for trajectory in trajectories:
                    assert (np.diff(trajectory.version[trajectory.model_mask]) >= 0).all(), "versions fall in a ledger"
                if index not in by_index:
                    self.reject(index, "the reward failed")
                    continue
                self.builder.note(by_index[index], objections[index], self.counts)
                if (objection := objections[index]) is not None:
                    self.reject(index, objection.reason)
                else:
                    self.finished[index] = by_index[index]
            self.dispatch()
            self.measure()
            self.changed.notify_all()

    def reject(self, index: int, reason: str) -> None:
        """Leave a group out, with the reason in a file; another one begins in its place."""
        del self.begun[index]
        self.rejected, self.rejected_since = self.rejected + 1, self.rejected_since + 1
        row = {"group": index, "prompt": self.order.prompt(index)[0], "step": self.step + 1, "reason": reason}
        self.rejected_file.parent.mkdir(parents=True, exist_ok=True)
        with self.rejected_file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def take(self, step: int) -> Rollout:
        with self.changed:
            while (chosen := self.selected()) is None:
                self.check_rejections()
                size = self.order.before(step + 1) - self.order.before(step)
                why = "deadline" if len(self.finished) >= size else "batch"
                with self.builder.wait(f"waiting_for_{why}"):
                    self.until(self.news(), f"a group of step {step + 1}", THREAD)
        if self.pauses:
            self.builder.sampler.pause()
        with self.changed:
            self.is_paused = self.pauses
            self.measure()
            groups = [self.finished.pop(index) for index in sorted(chosen)]
            for index in chosen:
                del self.begun[index]
            trained = self.order.before(step + 1)
            assert self.outstanding == trained + len(self.begun), "a group was lost, or trained on twice"
            left, late = len(self.begun), sum(i < max(chosen) and i not in self.finished for i in self.begun)
            counts, self.counts = self.counts, Counter()
            rejected, self.rejected_since = self.rejected_since, 0
        for trajectory in (t for group in groups for t in group.trajectories):
            oldest = trajectory.version[trajectory.model_mask].min(initial=step)
            assert oldest >= step - self.bound, f"a token of version {oldest} in step {step}"
        metrics = {"async/outstanding": float(left), "async/rejected": float(rejected), "async/overtaken": float(late)}
        failures = counts["reward/errors"] + counts["reward/timeouts"]
        self.builder.scorer.check_error_rate(failures, counts.pop(SAMPLES, 0))
        return self.builder.finish(joined(groups), dict(counts) | metrics)

    def selected(self) -> list[int] | None:
        """Return the groups of the present step, or None while one of them is running."""
        self.check()
        return select(self.begun, [*self.finished], self.step, self.order.before, self.bound)

    def news(self) -> Callable[[], bool | None]:
        """Return a function that returns True when a group has ended since this call, and None before."""
        before = len(self.finished), self.rejected
        return lambda: None if (len(self.finished), self.rejected) == before else True

    def check_rejections(self) -> None:
        """End the run if filtering rejects group after group."""
        algo, size = self.builder.algo, self.order.order.batch_size
        if self.rejected_since > algo.dynamic_filtering_max_rounds * size:
            raise RunError(
                f"{self.rejected_since} groups were rejected since the last step, too many for a batch (the reasons "
                f"are in {self.rejected_file}). Widen algo.dynamic_filtering_range or change algo.group_filter, raise "
                "rollout.n_samples_per_prompt, or take other prompts"
            )

    def allow_sync(self, version: int) -> None:
        """Take note that the weights `version` are trained. A sync may fall between any two steps of the engines."""
        with self.changed:
            self.check()
            self.step = version

    def synced(self, version: int) -> None:
        with self.changed:
            self.version, self.is_paused = version, False
            self.dispatch()
            self.measure()
        if self.pauses:
            self.builder.sampler.resume()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        if self.scoring.is_alive():
            self.scoring.join(CLOSING_S)

    def save(self, folder: Path) -> None:
        """Write the finished groups that are not trained on yet, and the indices of those that are running."""
        with self.changed:
            begun, finished = dict(self.begun), dict(self.finished)
            state = {
                "next": self.next,
                "rejected": self.rejected,
                "begun": [*begun.items()],
                "finished": [*finished],
                "skipped": self.skipped,
                "round_end": self.round_end,
                "chosen": sorted(self.chosen),
            }
            self.builder.state.history.save(folder)
        if finished:
            write_samples(folder, joined([*finished.values()]))
        (folder / "stream.json").write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        state = json.loads((folder / "stream.json").read_text())
        self.next, self.rejected, self.begun = state["next"], state["rejected"], dict(state["begun"])
        # A checkpoint from before there were filters of prompts has none of these three.
        self.skipped, self.round_end = state.get("skipped", 0), state.get("round_end", 0)
        self.chosen = {*state.get("chosen", ())}
        self.builder.state.history = History.load(folder)
        if state["finished"]:
            self.finished = dict(zip(state["finished"], read_samples(folder).by_group(), strict=True))
