"""Rewards and the KL penalty become advantages at the right tokens: everything here is computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from given import prompt
from memory import peak_bytes
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig, DistillTermConfig, KLConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.trajectory import Experience, Trajectory, to_batch
from rlhf_suite.registry import estimator
from rlhf_suite.rl.credit import CreditAssigner

MASK = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]
KL = [9.0, 0.5, 9.0, -0.2, 9.0, 0.1, 0.3]  # k1; the nines stand where no model token is


@pytest.fixture
def batch() -> Experience:
    """Two answers to one prompt, the first with an environment's token between its two own."""
    reference = torch.full((7,), -1.0)
    return Experience(
        ids=torch.arange(7),
        lengths=torch.tensor([4, 3]),
        mask=torch.tensor(MASK),
        old_log_probs=reference + torch.tensor(KL),
        ref_log_probs=reference,
        reward=torch.tensor([2.0, 1.0]),
        group=torch.tensor([0, 0]),
    )


def assigner(**kl) -> CreditAssigner:
    return CreditAssigner(
        AlgoConfig.of("ppo", advantage=AdvantageConfig(estimator="rloo"), kl=KLConfig(init_coef=0.1, **kl))
    )


@pytest.mark.notices(
    "KL is a bonus in the reward",
    "algo/advantage.py",
    "    rewards = 0 - inputs.kl_penalty",
    "    rewards = 0 + inputs.kl_penalty",
)
@pytest.mark.notices(
    "estimators see what an environment wrote",
    "rl/credit.py",
    "        mask = batch.mask\n",
    "        mask = torch.ones_like(batch.mask)\n",
)
@pytest.mark.notices(
    "advantages come back in front of their tokens",
    "rl/credit.py",
    "    result[mask.bool().numpy()] = values.numpy()",
    "    result[: len(values)] = values.numpy()",
)
def test_the_kl_penalty_is_part_of_the_reward_to_go(batch):
    """RLOO: 2 - 1 and 1 - 2; penalties 0.05, -0.02 | 0.01, 0.03."""
    result, metrics = assigner().assign(batch)
    assert result.advantages.tolist() == pytest.approx([0, 0.97, 0, 1.02, 0, -1.04, -1.03])
    assert metrics == pytest.approx(
        {
            "train/kl_coef": 0.1,
            "train/kl": 0.7 / 4,
            "train/logprobs_diff": 0.7 / 4,
            "train/return": (2 - 0.03 + 1 - 0.04) / 2,
        }
    )
    assert batch.advantages is None


def test_kl_as_a_loss_leaves_the_reward_alone(batch):
    result, metrics = assigner(use_loss=True).assign(batch)
    assert result.advantages.tolist() == pytest.approx([0, 1, 0, 1, 0, -1, -1])
    assert metrics["train/return"] == pytest.approx(1.5)
    assert metrics["train/kl"] == pytest.approx(0.7 / 4), "it is measured all the same"


def test_without_a_reference_there_is_no_kl(batch):
    batch = replace(batch, ref_log_probs=None)
    result, metrics = assigner().assign(batch)
    assert result.advantages.tolist() == pytest.approx([0, 1, 0, 1, 0, -1, -1])
    assert "train/kl" not in metrics


def test_gae_gives_returns_for_the_critic(batch):
    """gamma = lambda = 1: returns are rewards to go, advantages returns - values, here minus their mean."""
    batch = replace(batch, values=torch.tensor([7.0, 0.5, 7.0, 1.0, 7.0, 0.25, 0.75]))
    config = AlgoConfig.of(
        "ppo", advantage=AdvantageConfig(estimator="gae", no_std_norm=True), kl=KLConfig(init_coef=0.1)
    )
    result, metrics = CreditAssigner(config).assign(batch)
    returns = [0, 2 - 0.03, 0, 2 + 0.02, 0, 1 - 0.04, 1 - 0.03]
    raw = [1.97 - 0.5, 2.02 - 1.0, 0.96 - 0.25, 0.97 - 0.75]
    mean = sum(raw) / 4
    wanted = [0, raw[0] - mean, 0, raw[1] - mean, 0, raw[2] - mean, raw[3] - mean]
    own = torch.tensor(MASK).bool()
    assert result.returns[own].tolist() == pytest.approx([r for r, m in zip(returns, MASK, strict=True) if m])
    assert result.advantages.tolist() == pytest.approx(wanted, abs=1e-6)
    assert metrics["train/values"] == pytest.approx(2.5 / 4)


def ledger(group: int, *turns: int) -> Trajectory:
    """A prompt of two tokens, then turns of the model (positive: so many tokens) and of a tool (negative)."""
    result = Trajectory.start(prompt(), group, 0)
    for count in turns:
        if count > 0:
            result.append_model(np.full(count, 3), np.zeros(count, np.float32), 0)
        else:
            result.append_environment([4] * -count)
    return result


def turns_credit(trajectories, rewards, tokens=None, **advantage) -> Experience:
    batch = replace(to_batch(trajectories), reward=torch.tensor(rewards), **(tokens or {}))
    return CreditAssigner(AlgoConfig.of("ppo", advantage=AdvantageConfig(no_std_norm=True, **advantage))).assign(batch)[
        0
    ]


def test_gae_bootstraps_across_what_a_tool_wrote_and_decays_by_model_tokens_alone():
    """gamma = lambda = 0.5, values 1, 2 | 4 on either side of three tokens of a tool, reward 8: deltas 0.5 x 2 - 1 = 0,
    0.5 x 4 - 2 = 0, 8 - 4 = 4; advantages 4, 0.25 x 4 = 1, 0.25 x 1 = 0.25, whose mean is 1.75."""
    values = torch.tensor([9.0, 9.0, 1.0, 2.0, 9.0, 9.0, 9.0, 4.0])
    batch = turns_credit([ledger(0, 2, -3, 1)], [8.0], {"values": values}, estimator="gae", gamma=0.5, lambd=0.5)
    assert batch.advantages.tolist() == [0, 0, 0.25 - 1.75, 1 - 1.75, 0, 0, 0, 4 - 1.75]
    assert batch.returns[[2, 3, 7]].tolist() == [1.25, 3, 8]


def test_reinforce_discounts_by_model_tokens_alone():
    batch = turns_credit([ledger(0, 2, -3, 1)], [8.0], estimator="reinforce", gamma=0.5)
    mean = (2 + 4 + 8) / 3
    assert batch.advantages.tolist() == pytest.approx([0, 0, 2 - mean, 4 - mean, 0, 0, 0, 8 - mean])


@pytest.mark.notices(
    "samples without model tokens are part of baselines",
    "algo/advantage.py",
    "    written = inputs.lengths > 0\n    if inputs.episodes",
    "    written = inputs.lengths >= 0\n    if inputs.episodes",
)
@pytest.mark.parametrize(
    ("estimator", "wanted"),
    [("reinforce_baseline", 1.5), ("rloo", 3), ("group_norm", 0.5**0.5), ("dr_grpo", 1.5), ("opo", 1.5)],
)
def test_a_sample_in_which_only_a_tool_spoke_is_in_no_baseline(estimator, wanted):
    """Rewards 4 and 1 of the two that spoke, one token each: mean 2.5, deviation 1.5 x sqrt(2)."""
    samples = [ledger(0, 1), ledger(0, -2), ledger(0, -1, 1)]
    batch = turns_credit(samples, [4.0, math.nan, 1.0], estimator=estimator)
    assert batch.advantages.tolist() == pytest.approx([0, 0, wanted, *[0] * 4, 0, 0, 0, -wanted])


def with_every_column(trajectories: list[Trajectory]) -> Experience:
    """Random log-probs, values and rewards; what stands where the model did not write must not matter."""
    batch = to_batch(trajectories)
    numbers = torch.Generator().manual_seed(0)
    old, reference, values = (torch.randn(batch.num_tokens, generator=numbers) for _ in range(3))
    rewards, greedy = (torch.rand(len(batch), generator=numbers) for _ in range(2))
    return replace(batch, old_log_probs=old, ref_log_probs=reference, values=values, reward=rewards, greedy=greedy)


@pytest.mark.parametrize("name", estimator.names())
def test_what_an_environment_wrote_changes_no_bit_of_the_credit(name):
    """Tokens of tools before, between and after those of the model, and the same samples without them."""
    turns = with_every_column([ledger(0, -2, 3, -4, 1), ledger(0, 2, -1), ledger(1, -3), ledger(1, 1, -1, 1, -1, 4)])
    own = turns.mask.bool()
    lengths = torch.zeros(len(turns), dtype=torch.int64).index_add(0, turns.segments, own.long())
    alone = replace(turns.map_columns(lambda tokens: tokens[own], lambda rows: rows, None), lengths=lengths)
    advantage = AdvantageConfig(estimator=name, gamma=0.8, lambd=0.9, reward_parts=["answer"])
    config = AlgoConfig.of("ppo", advantage=advantage, kl=KLConfig(init_coef=0.1))
    parts = [{"answer": float(row % 3)} for row in range(len(turns))]
    one, other = (CreditAssigner(config).assign(batch, parts)[0] for batch in (turns, alone))
    assert torch.equal(one.advantages[own], other.advantages) and not one.advantages[~own].any()
    assert torch.equal(one.returns[own], other.returns) and not one.returns[~own].any()


def size(batch: TokenBatch) -> int:
    return sum(each.nbytes for each in (batch.ids, *batch.columns("token").values()))


@cache
def one_long_row() -> Experience:
    return with_every_column([ledger(0, 4_000), *(ledger(row // 4, 4) for row in range(63))])


@pytest.mark.parametrize("name", estimator.names())
def test_a_row_far_longer_than_the_others_takes_no_more_memory_than_its_tokens(name):
    """Rows padded to the longest would be 60 times the batch, for each of a dozen arrays. Small objects count too."""
    batch = one_long_row()
    advantage = AdvantageConfig(estimator=name, gamma=0.9, lambd=0.9, reward_parts=["answer"])
    config = AlgoConfig.of("ppo", advantage=advantage, kl=KLConfig(init_coef=0.1))
    parts = [{"answer": 1.0}] * len(batch)
    assert peak_bytes(lambda: CreditAssigner(config).assign(batch, parts)) < 4 * size(batch)


def with_teacher(batch, log_probs):
    return replace(batch, teacher_log_probs=batch.old_log_probs + torch.tensor(log_probs))


TEACHER = [9.0, 0.25, 9.0, -0.5, 9.0, -30.0, 0.0]  # log p_teacher - log p_policy


@pytest.mark.notices(
    "the teacher pushes away",
    "rl/credit.py",
    "advantages - self.config.distill.coef * gap",
    "advantages + self.config.distill.coef * gap",
)
def test_on_policy_distillation_gives_every_token_its_own_log_ratio(batch):
    """Of no reward and no other token; -30 nats are clamped to -10, but not in the estimate of the KL. The KL to a
    reference counts token by token too."""
    config = AlgoConfig.of(
        "ppo",
        advantage=AdvantageConfig(estimator="on_policy_distill"),
        kl=KLConfig(init_coef=0.1),
        distill=DistillTermConfig(coef=1.0),
    )
    result, metrics = CreditAssigner(config).assign(with_teacher(batch, TEACHER))
    assert result.advantages.tolist() == pytest.approx([0, 0.2, 0, -0.48, 0, -10.01, -0.03], abs=1e-6)
    assert metrics["train/teacher_kl"] == pytest.approx((-0.25 + 0.5 + 30 + 0) / 4)
    batch = with_teacher(replace(batch, ref_log_probs=None), TEACHER)
    result, _ = CreditAssigner(config).assign(batch)
    assert result.advantages.tolist() == pytest.approx([0, 0.25, 0, -0.5, 0, -10, 0], abs=1e-6)


def test_a_teacher_is_added_to_what_the_estimator_makes_of_rewards(batch):
    """RLOO's 1 and -1, and half of the log-ratio."""
    batch = replace(batch, ref_log_probs=None)
    config = AlgoConfig.of("ppo", advantage=AdvantageConfig(estimator="rloo"), distill=DistillTermConfig(coef=0.5))
    result, _ = CreditAssigner(config).assign(with_teacher(batch, TEACHER))
    assert result.advantages.tolist() == pytest.approx([0, 1.125, 0, 0.75, 0, -6, -1], abs=1e-6)


def test_the_adaptive_controller_learns_from_the_measured_kl(batch):
    one = assigner(target=0.1, horizon=1000)
    _, metrics = one.assign(batch)
    one.adapt(metrics, 2)
    assert one.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 1000))  # 0.175 / 0.1 - 1 is clipped to 0.2
    one.adapt({}, 2)
    assert one.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 1000))
    fixed = assigner()
    fixed.adapt(metrics, 2)
    assert fixed.kl_coef == 0.1


@pytest.mark.notices(
    "an episode of several ledgers counts with the reward of each",
    "rl/credit.py",
    "own = rewards / ledgers - ",
    "own = rewards - ",
)
def test_the_return_of_an_episode_of_two_ledgers_is_one_reward_less_the_penalties_of_both(batch):
    batch = replace(batch, reward=torch.tensor([2.0, 2.0]), episode=torch.tensor([0, 0]))
    assert assigner().assign(batch)[1]["train/return"] == pytest.approx(2 - 0.03 - 0.04)


def test_one_model_token_is_enough_for_metrics(batch):
    batch = replace(batch, mask=torch.tensor([0.0, 1.0, 0, 0, 0, 0, 0]))
    assert assigner().assign(batch)[1]["train/kl"] == pytest.approx(0.5)


def test_a_rollout_without_model_tokens_is_no_nan(batch):
    batch.mask.zero_()
    result, metrics = assigner().assign(batch)
    assert result.advantages.tolist() == [0] * 7
    assert all(map(math.isfinite, metrics.values())), metrics


def test_a_turn_is_rewarded_where_it_ends_and_a_baseline_takes_the_whole_reward():
    """gamma 0.5: the first turn has 3 for itself and 0.5 x 0.5 of the outcome's 1, which stands at the last token of
    the second turn; less their mean. RLOO compares 4 with 2."""
    first, second = ledger(0, 2), ledger(0, 2)
    first.reward_turn(3.0)
    first.append_environment([4])
    first.append_model(np.full(1, 3), np.zeros(1, np.float32), 0)
    discounted = turns_credit([first, second], [4.0, 2.0], estimator="reinforce", gamma=0.5)
    own = [1.5 + 0.25, 3 + 0.5, 1, 1, 2]
    assert discounted.advantages[discounted.mask.bool()].tolist() == pytest.approx([r - sum(own) / 5 for r in own])
    compared = turns_credit([first, second], [4.0, 2.0], estimator="rloo")
    assert compared.advantages.tolist() == [0, 0, 2, 2, 0, 2, 0, 0, -2, -2]


@pytest.mark.notices(
    "advantages are clipped before the teacher's term",
    "rl/credit.py",
    "clip_advantages(advantages, clip_range), advantages",
    "clip_advantages(put_back(credit.advantages, mask), clip_range), advantages",
)
def test_advantages_are_clipped_after_the_teacher_and_the_share_of_clipped_tokens_is_measured(batch):
    """RLOO without KL gives 1, 1, -1, -1; the teacher's gaps of 0.5, -3, 0.5 and 1.5 are taken away from them."""
    gaps = torch.tensor([0, 0.5, 0, -3, 0, 0.5, 1.5])
    batch = replace(batch, ref_log_probs=None, teacher_log_probs=batch.old_log_probs - gaps)
    config = AlgoConfig.of(
        "ppo", advantage=AdvantageConfig(estimator="rloo", clip_range=[-1.25, 2.0]), distill=DistillTermConfig(coef=1.0)
    )
    result, metrics = CreditAssigner(config).assign(batch)
    assert result.advantages.tolist() == pytest.approx([0, 0.5, 0, 2, 0, -1.25, -1.25])
    assert metrics["train/advantage_clip_ratio"] == pytest.approx(3 / 4)
    assert (
        "train/advantage_clip_ratio"
        not in CreditAssigner(replace(config, advantage=AdvantageConfig("rloo"))).assign(batch)[1]
    )


@pytest.mark.parametrize(("loss", "reference", "wanted"), [(False, True, 0.1), (True, True, 0), (False, False, 0)])
def test_an_estimator_knows_the_beta_of_the_kl_penalty(batch, tmp_path, loss, reference, wanted):
    """The coefficient is that of the step, as the controller has it; it is 0 where the KL is no penalty."""
    own = tmp_path / "own.py"
    lines = ("from rlhf_suite.algo.advantage import Credit", "def beta(inputs, config):")
    body = "    found = inputs.kl_penalty * 0 + inputs.kl_coef\n    return Credit(found, found)\n"
    own.write_text("\n".join((*lines, body)))
    config = AlgoConfig.of(
        "ppo", advantage=AdvantageConfig(estimator=f"{own}:beta"), kl=KLConfig(init_coef=0.1, use_loss=loss)
    )
    given = batch if reference else replace(batch, ref_log_probs=None)
    found = CreditAssigner(config).assign(given)[0].advantages
    assert found.tolist() == pytest.approx([wanted * each for each in MASK])
