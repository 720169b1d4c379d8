"""Rounds of candidates: what each step gets, what waits for the next one, and a resume of it."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hand_made_samples import scored, trajectory

from given import prompt
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rl.filtering import Filters
from rlhf_suite.rl.rollout import Rollout, RolloutBuilder
from rlhf_suite.rl.rollout_tasks import Rollouts
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.rl.schedules import Rest, Schedule, Stream, WithTheStep
from rlhf_suite.rl.scoring import ScoredGroup, Scorer, Scores
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.rl.slots import GroupOrder
from rlhf_suite.tracking.journal import Journal

PROMPTS = 8


class Answers(Scorer):
    """In place of engines and reward: the answers to a prompt differ when its index is even. With `waits`, a group is
    complete when the one after it has been scored, and the last group of a round is the first that is complete."""

    def __init__(self, journal: Journal, waits: bool = False) -> None:
        super().__init__(RewardConfig.of("ppo"), None, SimpleNamespace(reads_text_alone=True), journal)
        self.asked: dict[int, list[int]] = {}  # prompts by stream of random numbers
        self.waits, self.open = waits, dict[int, tuple[Future[list[Trajectory]], int]]()
        self.happened: list[str] = []  # in this order
        self.fails = range(0)  # groups that get no reward

    def start(self, group: int, prompt: Prompt, stream: int) -> Future[list[Trajectory]]:
        self.asked.setdefault(stream, []).append(prompt.index)
        future: Future[list[Trajectory]] = Future()
        self.open[group] = future, prompt.index
        if not self.waits or len(self.open) == 3:
            self.answer(group)
        return future

    def answer(self, group: int) -> None:
        future, index = self.open.pop(group)
        future.set_result([trajectory(index, group, sample) for sample in range(2)])

    def pause(self) -> None:
        self.happened.append("pause")

    def resume(self) -> None:
        self.happened.append("resume")

    def wake(self) -> None:
        self.happened.append("wake")

    def score(self, groups):
        self.happened.append("score")
        found = {}
        for group in groups:
            number, rewards = group[0].group, [float(t.prompt.index % 2 == 0 and t.sample == 0) for t in group]
            samples = None if number in self.fails else scored(group, rewards)
            found[number] = ScoredGroup(number, samples, len(group), 0)
        if self.waits:
            (number,) = found
            if number - 1 in self.open:
                self.answer(number - 1)
        return Scores(found, {})


@pytest.fixture
def rollouts(tmp_path):
    """3 prompts a step, sampled 4 at a time from 8 of which 4 teach something."""
    from rlhf_suite.config.declarations.logger import LoggerConfig
    from rlhf_suite.run_folders.run_folder import RunFolder

    loops = []

    def make(waits=False, state=None, round_size=None, rests=Rest.NEVER, stream: Schedule | None = None, **algo):
        config = AlgoConfig.of("ppo", **{"dynamic_filtering_enable": True} | algo)
        journal = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "ppo")
        answers, batches = Answers(journal, waits), BatchOrder(PROMPTS, 3, 0)
        filters = Filters(config, [prompt(index) for index in range(PROMPTS)], 0)
        builder = RolloutBuilder(filters, answers, Shaper(RewardConfig.of("ppo"), lambda _: 9), journal)
        rounds = replace(batches, batch_size=round_size or (4 if config.filters else 3))
        order = GroupOrder(batches, rounds, 100, config.filters, stream_by_round=config.filters)
        schedule, loop = stream or WithTheStep(config.dynamic_filtering_max_rounds, rests), LoopThread("test")
        loops.append(loop)
        made = Rollouts(schedule, order, builder, answers, loop, journal, is_beside=False)
        if state is not None:
            made.load(state)
        made.begin(made.table.step)
        return made

    yield make
    for loop in loops:
        loop.end(RunError("the test is over"))


def step_of(made: Rollouts, step: int) -> Rollout:
    """Return the rollout of a step, and train and sync it."""
    result = made.take(step)
    made.allow_sync(step + 1)
    made.note_sync(step + 1)
    return result


def prompts_of(samples: ScoredTrajectories) -> list[int]:
    return [t.prompt.index for t in samples.trajectories if t.sample == 0]


def waiting(made: Rollouts) -> list[int]:
    return [group.prompt for _, group in sorted(made.table.ready.items())]


@pytest.mark.notices(
    "groups are scored when all of a round are written",
    "rl/rollout_tasks.py",
    "(self.schedule.scores_whole_rounds and not is_written)",
    "not is_written",
    limit_s=60,
)
def test_a_group_is_scored_while_the_engines_write_others_and_the_rollout_has_its_order(rollouts):
    one = rollouts(waits=True, dynamic_filtering_enable=False)
    samples, metrics = one.take(0)
    assert prompts_of(samples) == one.table.order.batches.indices(0)
    assert [t.group for t in samples.trajectories] == [0, 0, 1, 1, 2, 2]
    assert samples.responses == [f"{t.prompt.index}.{t.sample}" for t in samples.trajectories]
    assert metrics["rollout/num_samples"] == 6


@pytest.mark.notices(
    "accepted groups that no step has taken yet are dropped",
    "rl/slots.py",
    "self.batches[self.taken], self.tally = batch, Tally()\n",
    "self.batches[self.taken], self.tally = batch, Tally()\n        self.ready.clear()\n",
)
def test_every_step_gets_its_groups_and_none_that_was_accepted_is_lost(rollouts):
    one = rollouts()
    trained = []
    for step in range(4):
        samples, metrics = step_of(one, step)
        assert len(prompts_of(samples)) == 3
        assert [t.group for t in samples.trajectories] == [0, 0, 1, 1, 2, 2]
        trained += prompts_of(samples)
        assert metrics["rollout/waiting_groups"] == len(waiting(one))
    even = [index for asked in one.sampler.asked.values() for index in asked if index % 2 == 0]
    assert trained + waiting(one) == even
    assert not any(index % 2 for index in trained)


def test_a_step_with_enough_waiting_groups_samples_nothing(rollouts):
    """4 of the 8 groups of a round are accepted, and 1, 2 and 3 of them wait after the first three steps."""
    one, rounds = rollouts(round_size=PROMPTS), []
    for step in range(5):
        asked = len(one.sampler.asked)
        _, metrics = step_of(one, step)
        rounds.append(metrics["rollout/filter_rounds"])
        assert len(one.sampler.asked) - asked == rounds[-1]
        assert ("rollout/filter_pass_rate" in metrics) == (rounds[-1] > 0)
    assert rounds == [1, 1, 1, 0, 1]


def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_happened(rollouts, tmp_path):
    whole, first = rollouts(), rollouts()
    found = [prompts_of(step_of(whole, step)[0]) for step in range(5)]
    again = [prompts_of(step_of(first, step)[0]) for step in range(2)]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    first.save(folder)
    second = rollouts(state=folder)
    again += [prompts_of(step_of(second, step)[0]) for step in range(2, 5)]
    assert again == found and waiting(second) == waiting(whole)
    assert whole.sampler.asked == first.sampler.asked | second.sampler.asked
    assert not {*first.sampler.asked} & {*second.sampler.asked}


def test_a_checkpoint_of_an_earlier_version_is_refused(rollouts, tmp_path):
    with pytest.raises(UserError, match=r"slots.json: its rollouts were saved by an earlier version of the suite"):
        rollouts(state=tmp_path)


@pytest.mark.notices(
    "a rollout of no groups is handed over",
    "rl/rollout_tasks.py",
    "            self.check(chosen)\n",
    "",
)
def test_rounds_are_bounded_and_nothing_to_train_on_is_an_error(rollouts):
    samples, _ = rollouts(dynamic_filtering_max_rounds=1).take(0)
    assert 0 < len(prompts_of(samples)) <= 3
    with pytest.raises(RunError, match=r"too hard or too easy"):
        rollouts(dynamic_filtering_range=[0.9, 1.0]).take(0)


def test_a_step_trains_on_the_prompts_of_an_earlier_round_but_for_those_that_failed(rollouts):
    one = rollouts(round_size=6, dynamic_filtering_enable=False)
    one.sampler.fails, indices = [4], one.table.order.batches.indices
    assert prompts_of(step_of(one, 0)[0]) == indices(0)
    assert prompts_of(step_of(one, 1)[0]) == [indices(1)[0], indices(1)[2]]
    assert sum(map(len, one.sampler.asked.values())) == 6
    assert prompts_of(step_of(one, 2)[0]) == indices(2)


@pytest.mark.parametrize("fails", [range(3), range(3, 6)], ids=["of a round's first step", "of its second"])
def test_a_step_of_which_all_groups_have_failed_ends_the_run_where_others_of_their_round_wait(rollouts, fails):
    one = rollouts(round_size=6, dynamic_filtering_enable=False)
    one.sampler.fails = fails
    with pytest.raises(RunError, match=rf"no group of step {fails.start // 3 + 1} has a reward \(logs/reward_failures"):
        [step_of(one, step) for step in range(2)]


@pytest.mark.notices(
    "the record of rejected groups names the step before",
    "rl/rollout_tasks.py",
    '"step": table.step + 1,',
    '"step": table.step,',
)
def test_groups_that_are_left_out_are_on_record(rollouts):
    one = rollouts()
    step_of(one, 0)
    lines = [json.loads(line) for line in one.rejected_file.read_text().splitlines()]
    assert [line["prompt"] % 2 for line in lines] == [1] * len(lines) and len(lines) == one.table.num_rejected > 0
    assert {line["reason"] for line in lines} == {"scores [0.0, 0.0]"} and {line["step"] for line in lines} == {1}


@pytest.mark.notices(
    "every round of filtering draws with the same seeds",
    "rl/slots.py",
    "(self.rounds if self.stream_by_round else self.batches).number(index)",
    "0",
)
@pytest.mark.notices(
    "a group draws by its own number, not by that of its round",
    "rl/rollout_tasks.py",
    "self.sampler.start(group.index, prompt, group.stream)",
    "self.sampler.start(group.index, prompt, group.index)",
)
def test_each_round_of_filtering_draws_other_samples(rollouts):
    one = rollouts()
    for step in range(3):
        step_of(one, step)
    streams = [*one.sampler.asked]
    assert streams == list(range(len(streams))) and len(streams) > 2
    assert all(len(asked) == 4 for asked in one.sampler.asked.values())


@pytest.mark.notices(
    "the pass rate of the filter is that of the last round",
    "rl/slots.py",
    "self.tally.accepted += 1",
    "self.tally.accepted = 1",
)
def test_the_pass_rate_is_of_all_rounds_of_a_step(rollouts):
    """A step takes 3 groups, which rounds of 2 prompts give one after the other."""
    one = rollouts(round_size=2)
    _, metrics = one.take(0)
    rounds = int(metrics["rollout/filter_rounds"])
    asked = [index for each in one.sampler.asked.values() for index in each]
    assert rounds == 2 and len(asked) == 4
    assert metrics["rollout/filter_pass_rate"] == sum(index % 2 == 0 for index in asked) / len(asked)


@pytest.mark.notices(
    "engines keep their memory while the last of a round is scored",
    "rl/rollout_tasks.py",
    "if is_written and self.schedule.rests == Rest.AFTER_ROUNDS:",
    "if False:",
)
@pytest.mark.notices(
    "engines that rest are asked for another round",
    "rl/rollout_tasks.py",
    "await self.loop.run_blocking(ENGINES, self.sampler.wake)",
    "pass",
)
@pytest.mark.notices(
    "engines that a sync has woken are woken again",
    "rl/rollout_tasks.py",
    "self.are_resting = False  # a sync",
    "pass  # a sync",
)
def test_engines_lend_their_memory_before_the_last_of_a_round_is_scored_and_wake_for_the_next(rollouts):
    """Each step has several rounds, whose groups are scored in one or several parts. A sync wakes the engines, too."""
    one = rollouts(round_size=2, rests=Rest.AFTER_ROUNDS)
    for step in range(2):
        step_of(one, step)
        happened, one.sampler.happened = one.sampler.happened, []
        rounds = " ".join(happened).split(" wake ")
        assert len(rounds) > 1 and all(each.endswith("pause score") for each in rounds), happened
        assert all(each.count("pause") == 1 for each in rounds) and happened[0] != "wake", happened


@pytest.mark.notices(
    "engines write on shared devices while the models train",
    "rl/rollout_tasks.py",
    "if self.schedule.rests != Rest.NEVER:",
    "if False:",
)
@pytest.mark.notices(
    "engines that rested while a step was trained are not told to go on",
    "rl/rollout_tasks.py",
    "must_resume = self.are_resting and",
    "must_resume = False and",
)
def test_engines_that_write_a_stream_on_shared_devices_rest_while_the_models_train(rollouts):
    one = rollouts(stream=Stream(1, 1, 100, rests=Rest.WHILE_TRAINING), dynamic_filtering_enable=False)
    for step, size in enumerate((3, 3, 2)):  # of the 8 prompts of an epoch
        assert len(prompts_of(one.take(step)[0])) == size
        one.sampler.happened.append("train")
        one.allow_sync(step + 1)
        one.note_sync(step + 1)
    assert [each for each in one.sampler.happened if each != "score"] == ["pause", "train", "resume"] * 3
