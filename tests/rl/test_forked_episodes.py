"""Episodes of several ledgers: each token that the model wrote is trained on once, and an episode counts as one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scored_ledgers import score_ledgers

from given import prompt
from rlhf_suite.algo.advantage import WITH_TIME
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig, KLConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.batch import take
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import Experience, Trajectory, to_batch
from rlhf_suite.errors import UserError
from rlhf_suite.models.load import load_model, load_tokenizer
from rlhf_suite.rewards.base import RewardFailure, Scored
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.filtering import Filters
from rlhf_suite.rl.objectives import PolicyObjective
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.sample_table import read_samples, write_samples
from rlhf_suite.rl.samples import ScoredTrajectories, join_groups
from rlhf_suite.rl.scoring import Scorer
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.rl.update import step_indices
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.journal import Journal

pytestmark = pytest.mark.stack

PROMPT, FIRST, SAID, SECOND = [40, 41], [60, 61, 62], [70], [80, 81]


def ledger(begins: list[int], *turns: list[int], group: int = 0, sample: int = 0, fork: int = 0) -> Trajectory:
    """A prompt, and turns of the model with what an environment says between them."""
    result = Trajectory.start(prompt(group, PROMPT, "p"), group, sample, begins)
    for number, turn in enumerate(turns):
        if number:
            result.append_environment(SAID)
        result.append_model(np.array(turn), np.full(len(turn), -0.5, np.float32), 4)
    result.fork = fork
    return result


def whole(sample: int) -> list[Trajectory]:
    return [ledger(PROMPT, FIRST, SECOND, sample=sample)]


def forked(sample: int) -> list[Trajectory]:
    """The same tokens, the second turn in a ledger of its own, whose prompt holds the first one."""
    again = [*PROMPT, *FIRST, *SAID]
    return [ledger(PROMPT, FIRST, sample=sample), ledger(again, SECOND, sample=sample, fork=1)]


def other(sample: int) -> list[Trajectory]:
    return [ledger(PROMPT, [90], sample=sample)]


def scored(trajectories: list[Trajectory], rewards: list[float]) -> ScoredTrajectories:
    texts, values = ["x"] * len(trajectories), np.array(rewards, np.float32)
    return ScoredTrajectories(trajectories, values, values, texts, texts, [{}] * len(texts))


def experience(trajectories: list[Trajectory], rewards: list[float], estimator: str, **more) -> Experience:
    batch = replace(to_batch(trajectories), reward=torch.tensor(rewards), **more)
    config = AlgoConfig.of("ppo", advantage=AdvantageConfig(estimator=estimator), kl=KLConfig(init_coef=0.1))
    return CreditAssigner(config).assign(batch)[0]


@pytest.fixture(scope="module")
def model():
    return load_model("builtin:tiny", head="lm", ds=DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True))


def gradient(model, batches: list[Experience], mode: str, loss: str = "ppo") -> tuple[torch.Tensor, float]:
    """Return the gradient of an optimiser step on micro-batches, and its loss."""
    actor = ActorConfig.of("ppo", loss_agg_mode=mode, policy_loss_type=loss, entropy_coef=0.01)
    objective = PolicyObjective(actor, KLConfig(), temperature=1.0, horizon=8)
    model.zero_grad()
    units = [objective.units(batch) for batch in batches]
    counts = {name: sum(float(each[name]) for each in units) for name in units[0]}
    total = 0.0
    for batch in batches:
        sums = objective.loss(model, batch).sums
        share = torch.stack([sums[name] / counts[name] for name in sums]).sum()
        share.backward()
        total += float(share.detach())
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), total


@pytest.mark.notices(
    "the ledgers of an episode are samples of their own in baselines",
    "rl/credit.py",
    "episodes=batch.episode,",
    "episodes=None,",
)
@pytest.mark.notices(
    "each ledger of an episode weighs as much as an episode",
    "losses/reduce.py",
    "whole = (counts if episode_tokens is None else episode_tokens)",
    "whole = counts",
)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("estimator", ["reinforce_baseline", "rloo", "group_norm", "opo"])
@pytest.mark.parametrize("splits", [[[0, 1, 2, 3]], [[1, 3], [0], [2]]])
def test_a_forked_episode_is_trained_on_as_its_unforked_twin_is(model, mode, estimator, splits, record_property):
    """Also where the ledgers of an episode are in different micro-batches."""
    twin = experience([*whole(0), *other(1), *other(2)], [1.0, 0.0, 0.5], estimator)
    fork = experience([*forked(0), *other(1), *other(2)], [1.0, 1.0, 0.0, 0.5], estimator)
    assert fork.advantages[fork.mask.bool()].tolist() == pytest.approx(twin.advantages[twin.mask.bool()].tolist())
    parts = [take(fork, rows) for rows in splits]
    (wanted, loss), (found, of_parts) = gradient(model, [twin], mode), gradient(model, parts, mode)
    assert of_parts == pytest.approx(loss, abs=1e-6)
    error = float((found - wanted).norm() / wanted.norm())
    record_property("relative difference of gradients", float(error))
    assert error < 1e-4
    by_ledgers = [replace(part, episode=None, episode_tokens=None) for part in parts]
    changed = gradient(model, by_ledgers, mode)[0]
    assert (float((changed - wanted).norm() / wanted.norm()) < 1e-4) is (mode == "token-mean")


def test_the_ratio_of_gspo_is_that_of_a_ledger(model):
    """The ratios of the two turns are e and 1 / e^2 where the geometric mean of all five tokens would be e^(-1/5)."""
    batch = experience(forked(0) + other(1), [1.0, 1.0, 0.0], "rloo")
    objective = PolicyObjective(
        ActorConfig.of("ppo", policy_loss_type="gspo", loss_agg_mode="seq-mean-token-mean", eps_clip=9.0),
        KLConfig(),
        1.0,
        8,
    )
    old = -torch.tensor([0.0, 0, 1, 1, 1, *[0] * 6, -2, -2, 0, 0, 0])
    moved = replace(batch, old_log_probs=old)
    total = objective.surrogate(torch.zeros(len(old)), moved).total
    assert float(total) == pytest.approx(-(3 / 5 * np.e + 2 / 5 * np.exp(-2)) + 1, rel=1e-5)


def test_group_baselines_by_hand():
    """RLOO over episodes with the rewards 4, 1 and 1: 4 - 1 and twice 1 - 5 / 2."""
    trajectories = [*forked(0), ledger([1], [5], sample=0, fork=2), *other(1), *other(2)]
    batch = experience(trajectories, [4.0, 4.0, 4.0, 1.0, 1.0], "rloo")
    assert batch.advantages[batch.mask.bool()].tolist() == [3] * 6 + [-1.5] * 2
    assert batch.episode_tokens.tolist() == [6, 6, 6, 1, 1] and batch.num_episodes == 3
    assert float(batch.mask.sum()) == 8, "the first turn is context in the second ledger"


def test_the_return_is_a_mean_over_episodes():
    """5 and 1, less 0.1 x KL of 0.5 at each of six tokens."""
    batch = replace(to_batch(forked(0) + other(1)), reward=torch.tensor([5.0, 5.0, 1.0]))
    reference = torch.full((batch.num_tokens,), -1.0)
    batch = replace(batch, ref_log_probs=reference, old_log_probs=reference + 0.5)
    config = AlgoConfig.of(
        "ppo", advantage=AdvantageConfig(estimator="rloo"), kl=KLConfig(init_coef=0.1, estimator="k1")
    )
    _, metrics = CreditAssigner(config).assign(batch)
    assert metrics["train/return"] == pytest.approx((5 + 1 - 6 * 0.05) / 2)


@pytest.mark.parametrize("estimator", WITH_TIME)
def test_estimators_that_know_time_refuse_forks(estimator):
    more = {"values": torch.zeros(16)} if estimator == "gae" else {}
    with pytest.raises(UserError, match=rf"algo.advantage.estimator={estimator}: the history .* was rewritten"):
        experience(forked(0) + other(1), [1.0, 1.0, 0.0], estimator, **more)
    assert set(WITH_TIME) == {"gae", "reinforce"}


@pytest.mark.notices(
    "the ledgers of an episode are in several optimiser steps",
    "data/trajectory.py",
    "        return chosen\n",
    "        return [*games]\n",
)
def test_the_ledgers_of_an_episode_are_in_one_optimiser_step():
    trajectories = [t for sample in range(6) for t in (forked(sample) if sample % 2 else other(sample))]
    batch = to_batch(trajectories)
    steps = [batch.ledgers_of(episodes) for episodes in step_indices(batch.num_episodes, 2, 1, (0, 0))]
    assert len(steps) == 3 and sorted(row for step in steps for row in step) == list(range(9))
    samples = [{trajectories[row].sample for row in step} for step in steps]
    assert [len(each) for each in samples] == [2, 2, 2] and set.union(*samples) == set(range(6))


def test_metrics_are_means_over_episodes():
    found = sample_metrics(scored([*forked(0), *other(1)], [1.0, 1.0, 0.0]))
    assert (found["train/reward"], found["rollout/num_samples"], found["rollout/reward_std"]) == (0.5, 2, 0.5)
    assert found["train/response_length"] == (5 + 1) / 2, "of all ledgers"
    assert found["train/total_length"] == ((5 + 8) + 3) / 2
    assert found["train/group_reward_std"] == pytest.approx(0.5**0.5)


@pytest.mark.notices(
    "dynamic filtering counts ledgers", "rl/filtering.py", "episodes = group.episodes()", "episodes = group"
)
def test_dynamic_filtering_counts_episodes():
    """The scores 1 and 0 have the mean 1/2, which two ledgers of the first would make 2/3."""
    algo = AlgoConfig.of("ppo", dynamic_filtering_enable=True, dynamic_filtering_range=[0.0, 0.6])
    group = scored([*forked(0), *other(1)], [1.0, 1.0, 0.0])
    assert Filters(algo, [], 0).objection(group) is None


def test_penalties_are_those_of_episodes():
    """Of ten tokens after the prompt the last six cost; the longest ledger has one of these."""
    long = [ledger(PROMPT, [50] * 5), ledger(PROMPT, [51], fork=1)]
    long[0].ending = Ending.CUT  # a turn in the middle
    cut = [ledger(PROMPT, [50], sample=1), ledger(PROMPT, [51], sample=1, fork=1)]
    cut[1].ending = Ending.CUT
    samples = scored([*long, *cut], [1.0] * 4)
    shaped = Shaper(RewardConfig.of("ppo", overlong_buffer_len=6), lambda prompt: 10).shape(samples)
    assert shaped.rewards.tolist() == pytest.approx([1 - 1 / 6] * 2 + [1] * 2)
    shaped = Shaper(RewardConfig.of("ppo", stop_properly_penalty_coef=0.5), lambda prompt: 10).shape(samples)
    assert shaped.rewards.tolist() == [1, 1, 0.5, 0.5]


def test_greedy_baselines_may_have_forks_too():
    greedy = [replace(t, greedy=True) for t in forked(0)]
    shaped = Shaper(RewardConfig.of("ppo"), lambda prompt: 10).shape(
        scored([*forked(0), *greedy], [1.0, 1.0, 3.0, 3.0])
    )
    assert shaped.greedy is not None and (shaped.rewards.tolist(), shaped.greedy.tolist()) == ([1, 1], [3, 3])


class Counting:
    """A source of rewards that keeps what it was asked."""

    def __init__(self, *outcomes) -> None:
        self.outcomes, self.asked = outcomes, []

    def score(self, samples):
        self.asked += [sample.query for sample in samples]
        return list(self.outcomes), {}


@pytest.fixture
def score(tmp_path):
    """Score ledgers of one prompt by a source of rewards."""

    def scored_by(source: Counting, trajectories: list[Trajectory], **config):
        journal = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), "ppo")
        tokenizer = load_tokenizer("builtin:tiny", DataConfig.of("ppo"))
        return score_ledgers(Scorer(RewardConfig.of("generate", **config), tokenizer, source, journal), trajectories)

    return scored_by


@pytest.mark.notices(
    "the first ledger of an episode is scored",
    "rl/scoring.py",
    "in zip(rows.lasts, episodes, strict=True)",
    "in zip(rows.starts, episodes, strict=True)",
)
def test_a_reward_source_sees_an_episode_once_and_its_reward_is_that_of_all_ledgers(score):
    source = Counting(Scored(4.0, 0.5, {"steps": 2.0}), Scored(1.0, 0.25))
    result, _ = score(source, [*forked(0), *other(1)])
    assert len(source.asked) == 2 and source.asked[0] == result.queries[1], "the ledger with the last turn"
    assert result.rewards.tolist() == [4, 4, 1] and result.scores.tolist() == [0.5, 0.5, 0.25]
    assert result.extra == [{"steps": 2.0}] * 2 + [{}]


def test_the_outcome_of_an_agent_is_in_the_last_ledger_and_turns_of_all_ledgers_count(score):
    ledgers = [*forked(0), *forked(1)]
    ledgers[0].reward_turn(0.5)
    ledgers[1].reward_turn(0.25)
    ledgers[1].reward, ledgers[1].extra = 2.0, {"agent/turns": 2.0}
    ledgers[3].reward = 1.0
    result, _ = score(Counting(), ledgers)
    assert result.rewards.tolist() == [2.75, 2.75, 1, 1]
    assert [each.get("agent/turns") for each in result.extra] == [2.0, 2.0, None, None]


def test_failures_are_counted_by_episodes(score):
    """One of four episodes fails, and its group has no sample any more."""
    source = Counting(Scored(1.0, 1.0), RewardFailure("no", "error"), Scored(1.0, 1.0), Scored(0.0, 0.0))
    second = [replace(t, group=1) for t in [*forked(0), *other(1)]]
    result, metrics = score(source, [*other(0), *forked(1), *second], on_error="drop", max_error_rate=0.25)
    assert [t.group for t in result.trajectories] == [1, 1, 1]
    assert (metrics["reward/errors"], metrics["rollout/dropped_groups"]) == (1, 1)


def test_forks_that_wait_on_disk_are_the_same(tmp_path):
    groups = [scored([*forked(0), *other(1)], [1.0, 1.0, 0.0]), scored([*other(0), *forked(1)], [2.0, 3.0, 3.0])]
    write_samples(tmp_path, join_groups(groups))
    for ours, theirs in zip(read_samples(tmp_path).by_group(), groups, strict=True):
        assert [(t.sample, t.fork) for t in ours.trajectories] == [(t.sample, t.fork) for t in theirs.trajectories]
        assert ours.rewards.tolist() == theirs.rewards.tolist()
        assert [t.ids.tolist() for t in ours.trajectories] == [t.ids.tolist() for t in theirs.trajectories]
