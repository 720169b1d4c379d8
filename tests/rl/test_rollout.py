"""What becomes of samples before they are trained on: penalties, greedy baselines, filtering, and a resume of it."""

from __future__ import annotations

import math
import queue
from dataclasses import replace

import numpy as np
import pytest

from given import prompt
from rlhf_suite.config.algo import AlgoConfig
from rlhf_suite.config.reward import RLRewardConfig
from rlhf_suite.config.rollout import RolloutConfig
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.errors import RunError
from rlhf_suite.rl.filtering import Filters
from rlhf_suite.rl.rollout import BuilderState, RolloutBuilder
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.samples import ScoredTrajectories, joined
from rlhf_suite.rl.scoring import Scorer
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.tracking.journal import Journal

PROMPTS = 8


def trajectory(index=0, group=0, sample=0, own=3, *, finish="stop", greedy=False, source="a") -> Trajectory:
    """A prompt of 2 tokens, `own` of the model with one of an environment in between."""
    result = replace(Trajectory.start(prompt(index, datasource=source), group, sample), greedy=greedy)
    result.append_model(np.arange(own - 1), np.full(own - 1, -0.1, np.float32), 4)
    result.append_environment([7])
    result.append_model(np.array([9]), np.array([-0.3], np.float32), 4)
    result.ending = Ending.of_response(finish)
    return result


def scored(trajectories, rewards) -> ScoredTrajectories:
    texts = [f"{t.prompt.index}.{t.sample}" for t in trajectories]
    values = np.array(rewards, np.float32)
    return ScoredTrajectories(
        trajectories,
        values,
        values,
        texts,
        texts,
        [{}] * len(texts),
    )


def shaped(samples: ScoredTrajectories, **config) -> list[float]:
    # ten tokens after a prompt of two
    shaper = Shaper(RLRewardConfig(**config), max_new_tokens=lambda prompt: 12 - prompt)
    return shaper.shape(samples).rewards.tolist()


@pytest.mark.notices(
    "the overlong penalty counts what an environment wrote",
    "rl/shaping.py",
    "[t.response_length for t in trajectories]",
    "[len(t.ids) for t in trajectories]",
)
@pytest.mark.notices(
    "the longest response is that to an empty prompt",
    "rl/shaping.py",
    "self.max_new_tokens(int((trajectory.owner == PROMPT).sum()))",
    "self.max_new_tokens(0)",
)
@pytest.mark.notices(
    "tools leave an episode the room of a single turn",
    "rl/shaping.py",
    "(trajectory.owner == PROMPT).sum())) - others",
    "(trajectory.owner == PROMPT).sum())) - 0 * others",
)
def test_the_overlong_penalty_counts_model_tokens_and_the_room_that_others_left():
    """10 tokens are allowed, one of which an environment wrote: the last 4 of the 9 others cost."""
    samples = scored([trajectory(own=7), trajectory(own=5), trajectory(own=9)], [1.0, 1.0, 1.0])
    assert shaped(samples, overlong_buffer_len=4) == pytest.approx([0.5, 1.0, 0.0])
    assert shaped(samples, overlong_buffer_len=4, overlong_penalty_factor=2.0) == pytest.approx([0.0, 1.0, -1.0])


def test_an_episode_that_is_cut_off_is_as_overlong_as_a_single_turn():
    """Both end where nothing more fits: one wrote 16 tokens, the other 8 beside 8 of an environment."""
    single, episode = (Trajectory.start(prompt(), 0, sample) for sample in range(2))
    single.append_model(np.arange(16), np.zeros(16, np.float32), 0)
    episode.append_model(np.arange(4), np.zeros(4, np.float32), 0)
    episode.append_environment([7] * 8)
    episode.append_model(np.arange(4), np.zeros(4, np.float32), 0)
    shaper = Shaper(RLRewardConfig(overlong_buffer_len=4), lambda prompt: 16)
    assert shaper.shape(scored([single, episode], [1.0, 1.0])).rewards.tolist() == [0.0, 0.0]


def test_what_penalties_change_is_logged_like_parts_of_a_reward():
    samples = scored([trajectory(own=7, finish="length"), trajectory(own=5)], [1.0, 1.0])
    shaper = Shaper(RLRewardConfig(overlong_buffer_len=4, stop_properly_penalty_coef=0.5), lambda prompt: 12 - prompt)
    result = shaper.shape(samples)
    assert result.rewards.tolist() == [0.25, 1.0]
    assert result.extra == [
        {"overlong_penalty": -0.5, "stop_properly_penalty": -0.25},
        {"overlong_penalty": 0.0, "stop_properly_penalty": 0.0},
    ]
    assert sample_metrics(result)["reward/overlong_penalty"] == -0.25


def test_the_clip_is_of_the_raw_or_of_the_shaped_reward():
    samples = scored([trajectory(finish="length")], [8.0])
    penalty = {"clip_range": [-1.0, 1.0], "stop_properly_penalty_coef": 0.5}
    assert shaped(samples, **penalty) == [0.5]
    assert shaped(samples, **penalty, clip_shaped=True) == [1.0]
    assert samples.rewards.tolist() == [8.0], "the source's reward stays as it is"


@pytest.mark.notices(
    "greedy responses are trained on",
    "rl/shaping.py",
    "enumerate(scored.trajectories) if not t.greedy])",
    "enumerate(scored.trajectories)])",
)
def test_greedy_samples_become_baselines_of_their_group():
    plain = [trajectory(group=g, sample=s) for g in (0, 1) for s in (0, 1)]
    greedy = [trajectory(group=g, greedy=True) for g in (0, 1)]
    result = Shaper(RLRewardConfig(), lambda _: 10).shape(scored([*plain, *greedy], [1, 2, 3, 4, 5, 6]))
    assert result.rewards.tolist() == [1, 2, 3, 4] and not any(t.greedy for t in result.trajectories)
    assert result.greedy is not None and result.greedy.tolist() == [5, 5, 6, 6]


def test_metrics_are_told_by_source():
    samples = scored([trajectory(sample=s, source="abb"[s]) for s in range(3)], [1.0, 0.0, 1.0])
    metrics = sample_metrics(replace(samples, rewards=np.array([0.5, 0, 0.25], np.float32)))
    assert (metrics["train/reward"], metrics["train/score"]) == pytest.approx((0.25, 2 / 3))
    assert (metrics["train/a/pass_rate"], metrics["train/b/pass_rate"]) == (1, 0.5)
    assert metrics["train/b/reward"] == pytest.approx(0.125)
    assert metrics["train/b/response_length"] == 3 and metrics["train/b/truncated"] == 0
    assert "train/a/reward" not in sample_metrics(scored([trajectory()], [1.0]))


def test_further_values_of_rewards_and_of_agents_have_names_of_their_own():
    """A value of one of several reward sources has the name of its source."""
    extra = [{"n": 1.0, "steps/mean": 0.5, "agent/turns": 2.0}, {"n": 2.0, "agent/turns": 4.0}]
    metrics = sample_metrics(replace(scored([trajectory(), trajectory(sample=1)], [1.0, 0.0]), extra=extra))
    assert (metrics["reward/n"], metrics["reward/steps/mean"], metrics["agent/turns"]) == (1.5, 0.5, 3.0)


def test_samples_on_disk_are_the_same_samples(tmp_path):
    groups = [
        scored([trajectory(p, g, s, own=3 + s, greedy=s == 1) for s in range(2)], [0.1 * g, math.pi])
        for g, p in enumerate((5, 3))
    ]
    BuilderState(3, groups).save(tmp_path)
    read = BuilderState.load(tmp_path)
    assert read.rounds == 3
    for ours, theirs in zip(read.waiting, groups, strict=True):
        assert ours.rewards.tobytes() == theirs.rewards.tobytes() and ours.prompts == theirs.prompts
        for one, other in zip(ours.trajectories, theirs.trajectories, strict=True):
            for name in ("ids", "owner", "engine_log_probs", "version", "turn_rewards"):
                assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
                assert getattr(one, name).dtype == getattr(other, name).dtype
            assert (one.prompt.index, one.group, one.greedy) == (other.prompt.index, other.group, other.greedy)


def test_no_samples_on_disk_are_none(tmp_path):
    BuilderState(1).save(tmp_path)
    assert BuilderState.load(tmp_path) == BuilderState(1, [])


class Answers(Scorer):
    """In place of engines and reward: the answers to a prompt differ when its index is even. With `waits`, a group is
    complete when the one before it has been scored, and the last group is the first that is complete."""

    def __init__(self, journal: Journal, waits: bool = False) -> None:
        super().__init__(RLRewardConfig(), None, None, journal)
        self.asked: list[list[int]] = []
        self.waits, self.scored_groups = waits, queue.SimpleQueue[list[int]]()

    def sample_rollout(self, prompts, stream, ended):
        self.asked.append([each.index for each in prompts])
        for group, index in reversed([*enumerate(self.asked[-1])]):
            yield [trajectory(index, group, sample) for sample in range(2)]
            if self.waits:
                assert self.scored_groups.get(timeout=60) == [group, group]

    def sleep(self):
        pass

    def wake(self):
        pass

    def score(self, trajectories, is_part=False):
        self.scored_groups.put([t.group for t in trajectories])
        return scored(trajectories, [float(t.prompt.index % 2 == 0 and t.sample == 0) for t in trajectories]), {}


@pytest.fixture
def builder(tmp_path):
    """3 prompts a step, sampled 4 at a time from 8 of which 4 teach something."""
    from rlhf_suite.config.logger import LoggerConfig
    from rlhf_suite.tracking.run_folder import RunFolder

    def make(waits=False, **algo):
        config = PPORun(
            algo=AlgoConfig(**{"dynamic_filtering_enable": True} | algo),
            rollout=RolloutConfig(batch_size=3, n_samples_per_prompt=2, vllm_generate_batch_size=4),
        )
        journal = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "ppo")
        answers = Answers(journal, waits)
        return RolloutBuilder(
            Filters(config.algo, [], 0),
            config.rollout,
            BatchOrder(PROMPTS, 3, 0),
            answers,
            answers,
            Shaper(config.reward, lambda _: 9),
            journal,
            [prompt(index) for index in range(PROMPTS)],
        )

    return make


def test_a_group_is_scored_while_the_engines_write_others_and_the_rollout_has_its_order(builder):
    one = builder(waits=True, dynamic_filtering_enable=False)
    samples, metrics = one.build(0)
    assert prompts_of(samples) == one.order.indices(0)
    assert [t.group for t in samples.trajectories] == [0, 0, 1, 1, 2, 2]
    assert samples.responses == [f"{t.prompt.index}.{t.sample}" for t in samples.trajectories]
    assert metrics["rollout/num_samples"] == 6


def prompts_of(samples: ScoredTrajectories) -> list[int]:
    return [t.prompt.index for t in samples.trajectories if t.sample == 0]


@pytest.mark.notices(
    "accepted groups that no step has taken yet are dropped",
    "rl/rollout.py",
    "state.waiting[:wanted], state.waiting[wanted:]",
    "state.waiting[:wanted], []",
)
def test_every_step_gets_its_groups_and_none_that_was_accepted_is_lost(builder):
    one = builder()
    trained = []
    for step in range(4):
        samples, metrics = one.build(step)
        assert len(prompts_of(samples)) == 3
        assert [t.group for t in samples.trajectories] == [0, 0, 1, 1, 2, 2]
        trained += prompts_of(samples)
        assert metrics["rollout/waiting_groups"] == len(one.state.waiting)
    even = [index for asked in one.sampler.asked for index in asked if index % 2 == 0]
    assert trained + [group.trajectories[0].prompt.index for group in one.state.waiting] == even
    assert not any(index % 2 for index in trained)


def test_a_step_with_enough_waiting_groups_samples_nothing(builder):
    one = builder()
    one.state.waiting = [scored([trajectory(index, 0, s) for s in range(2)], [0, 1]) for index in (2, 4, 6, 0)]
    samples, metrics = one.build(0)
    assert prompts_of(samples) == [2, 4, 6] and one.sampler.asked == []
    assert (metrics["rollout/filter_rounds"], metrics["rollout/waiting_groups"]) == (0, 1)
    assert "rollout/filter_pass_rate" not in metrics


def test_it_goes_on_from_its_state_as_if_nothing_had_happened(builder, tmp_path):
    whole, first, second = builder(), builder(), builder()
    for step in range(5):
        whole.build(step)
    for step in range(2):
        first.build(step)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    first.state.save(folder)
    second.state = BuilderState.load(folder)
    for step in range(2, 5):
        last, _ = second.build(step)
    assert second.state.rounds == whole.state.rounds
    assert [g.trajectories[0].prompt.index for g in second.state.waiting] == [
        g.trajectories[0].prompt.index for g in whole.state.waiting
    ]
    assert whole.sampler.asked == first.sampler.asked + second.sampler.asked
    assert len(last.trajectories) == 6


def test_rounds_are_bounded_and_nothing_to_train_on_is_an_error(builder):
    few = builder(dynamic_filtering_max_rounds=1)
    samples, _ = few.build(0)
    assert 0 < len(prompts_of(samples)) <= 3
    with pytest.raises(RunError, match=r"too hard or too easy"):
        builder(dynamic_filtering_range=[0.9, 1.0]).build(0)


def test_groups_put_together_are_numbered_anew():
    groups = [scored([trajectory(p, 7, s) for s in range(2)], [0, 1]) for p in (5, 3)]
    assert [t.group for t in joined(groups).trajectories] == [0, 0, 1, 1]
    assert [t.group for t in groups[0].trajectories] == [7, 7]


@pytest.mark.notices(
    "every round of filtering draws with the same seeds",
    "rl/rollout.py",
    "self.sample(chosen, state.rounds)",
    "self.sample(chosen, 0)",
)
def test_each_round_of_filtering_draws_other_samples(builder):
    one = builder()
    streams = []
    sample_rollout = one.sampler.sample_rollout
    one.sampler.sample_rollout = lambda indices, stream, ended: (
        streams.append(stream) or sample_rollout(indices, stream, ended)
    )
    for step in range(3):
        one.build(step)
    assert streams == list(range(len(streams))) and len(streams) > 2


@pytest.mark.notices(
    "the pass rate of the filter is that of the last round",
    "rl/rollout.py",
    "sampled, accepted = sampled + len(fresh), accepted + len(kept)",
    "sampled, accepted = len(fresh), len(kept)",
)
def test_the_pass_rate_is_of_all_rounds_of_a_step(builder):
    """8 prompts of which 4 teach something: two rounds of 4 are all of them."""
    one = builder(dynamic_filtering_max_rounds=2)
    one.config.batch_size = 4
    _, metrics = one.filtered()
    assert (metrics["rollout/filter_rounds"], metrics["rollout/filter_pass_rate"]) == (2, 0.5)


@pytest.mark.notices(
    "groups are filtered by their shaped rewards",
    "rl/filtering.py",
    "for score in group.scores]",
    "for score in group.rewards]",
)
def test_groups_are_kept_by_the_scores_of_the_samples_that_are_trained_on(builder):
    """Neither by rewards, which a reward model standardises, nor with the greedy sample."""
    one = builder()
    samples = [trajectory(sample=s, greedy=s == 2) for s in range(3)]
    group = replace(scored(samples, [0.0, 1.0, 1.0]), rewards=np.array([-3, 5, 5], np.float32))
    assert one.filters.objection(group) is None
    objection = one.filters.objection(replace(group, scores=np.array([1, 1, 0], np.float32)))
    assert objection is not None and objection.reason == "scores [1.0, 1.0]"


@pytest.mark.notices("the spread inside groups is the biased one", "rl/sample_metrics.py", "std(ddof=1)", "std()")
def test_the_spread_inside_a_group_is_the_unbiased_deviation():
    samples = scored([trajectory(group=g, sample=s) for g in range(2) for s in range(2)], [0.0, 2.0, 1.0, 1.0])
    assert sample_metrics(samples)["train/group_reward_std"] == pytest.approx((2**0.5 + 0) / 2)
