"""What becomes of samples before they are trained on: penalties, greedy baselines, filtering, and a resume of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hand_made_samples import scored, trajectory

from given import prompt
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.rl.filtering import Filters
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.sample_table import read_samples, write_samples
from rlhf_suite.rl.samples import ScoredTrajectories, join_groups
from rlhf_suite.rl.shaping import Shaper


def shaped(samples: ScoredTrajectories, **config) -> list[float]:
    # ten tokens after a prompt of two
    shaper = Shaper(RewardConfig.of("ppo", **config), max_new_tokens=lambda prompt: 12 - prompt)
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
    shaper = Shaper(RewardConfig.of("ppo", overlong_buffer_len=4), lambda prompt: 16)
    assert shaper.shape(scored([single, episode], [1.0, 1.0])).rewards.tolist() == [0.0, 0.0]


def test_what_penalties_change_is_logged_like_parts_of_a_reward():
    samples = scored([trajectory(own=7, finish="length"), trajectory(own=5)], [1.0, 1.0])
    shaper = Shaper(
        RewardConfig.of("ppo", overlong_buffer_len=4, stop_properly_penalty_coef=0.5), lambda prompt: 12 - prompt
    )
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
    result = Shaper(RewardConfig.of("ppo"), lambda _: 10).shape(scored([*plain, *greedy], [1, 2, 3, 4, 5, 6]))
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


def test_samples_without_a_source_have_no_metrics_with_an_empty_name():
    metrics = sample_metrics(scored([trajectory(sample=s, source=("", "a")[s]) for s in range(2)], [1.0, 0.0]))
    assert metrics["train/a/score"] == 0 and metrics["train/score"] == 0.5
    assert not [name for name in metrics if "//" in name]


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
    write_samples(tmp_path, join_groups(groups))
    for ours, theirs in zip(read_samples(tmp_path).by_group(), groups, strict=True):
        assert ours.rewards.tobytes() == theirs.rewards.tobytes() and ours.prompts == theirs.prompts
        for one, other in zip(ours.trajectories, theirs.trajectories, strict=True):
            for name in ("ids", "owner", "engine_log_probs", "version", "turn_rewards"):
                assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
                assert getattr(one, name).dtype == getattr(other, name).dtype
            assert (one.prompt.index, one.group, one.greedy) == (other.prompt.index, other.group, other.greedy)


def test_groups_put_together_are_numbered_anew():
    groups = [scored([trajectory(p, 7, s) for s in range(2)], [0, 1]) for p in (5, 3)]
    assert [t.group for t in join_groups(groups).trajectories] == [0, 0, 1, 1]
    assert [t.group for t in groups[0].trajectories] == [7, 7]


@pytest.mark.notices(
    "groups are filtered by their shaped rewards",
    "rl/filtering.py",
    "for score in group.scores)",
    "for score in group.rewards)",
)
def test_groups_are_kept_by_the_scores_of_the_samples_that_are_trained_on():
    """Neither by rewards, which a reward model standardises, nor with the greedy sample."""
    filters = Filters(AlgoConfig.of("ppo", dynamic_filtering_enable=True), [], 0)
    samples = [trajectory(sample=s, greedy=s == 2) for s in range(3)]
    group = replace(scored(samples, [0.0, 1.0, 1.0]), rewards=np.array([-3, 5, 5], np.float32))
    assert filters.objection(group) is None
    objection = filters.objection(replace(group, scores=np.array([1, 1, 0], np.float32)))
    assert objection is not None and objection.reason == "scores [1.0, 1.0]"


@pytest.mark.notices("the spread inside groups is the biased one", "rl/sample_metrics.py", "std(ddof=1)", "std()")
def test_the_spread_inside_a_group_is_the_unbiased_deviation():
    samples = scored([trajectory(group=g, sample=s) for g in range(2) for s in range(2)], [0.0, 2.0, 1.0, 1.0])
    assert sample_metrics(samples)["train/group_reward_std"] == pytest.approx((2**0.5 + 0) / 2)
