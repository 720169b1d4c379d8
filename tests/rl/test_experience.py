"""When the policy's own log-probs of a rollout are measured, and which tokens are compared with the engine's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_run import small

from given import prompt
from rlhf_suite.config.plan.run_plan import Machine, resolve
from rlhf_suite.data.trajectory import Trajectory, to_batch
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.experience import ExperienceMaker
from rlhf_suite.rl.model_groups import PolicyGroup, ReferenceGroup
from rlhf_suite.rl.samples import ScoredTrajectories


def maker(policy=None, reference=None, **flags) -> ExperienceMaker:
    config = small(**flags)
    plan = resolve(config, Machine("cpu", 0))
    return ExperienceMaker(
        config.algo,
        config.rollout.temperature,
        policy,
        reference,
        None,
        steps_per_rollout=plan.optimizer_steps_per_rollout,
        critic_warm_up=plan.critic_warm_up,
        mismatch_limit=1e-4,
        token_entropy=config.rollout.token_entropy,
        chooses_tokens=config.actor.chooses_tokens,
    )


@pytest.mark.notices(
    "old log-probs are not measured though several steps follow", "rl/experience.py", "or steps_per_rollout > 1", ""
)
@pytest.mark.notices(
    "old log-probs are not measured while the critic warms up", "rl/experience.py", "or critic_warm_up > 0", ""
)
@pytest.mark.notices(
    "old log-probs are not measured where covariances choose tokens", "rl/experience.py", "or chooses_tokens", ""
)
@pytest.mark.parametrize(
    "flags",
    [
        {"train__batch_size": 2},
        {"train__max_epochs": 2},
        {"algo__advantage__estimator": "gae", "critic__freezing_steps": 1},
        {"algo__dynamic_filtering_enable": True},
        {"algo__advantage__is_correction_level": "token"},
        {"rollout__token_entropy": True},
        {"actor__policy_loss_type": "clip_cov"},
    ],
)
def test_old_log_probs_are_measured_where_the_policy_may_have_moved(flags):
    assert maker(**flags).needs_old_log_probs is True


def test_one_optimiser_step_on_fresh_samples_needs_no_old_log_probs():
    """Its own log-probs are the old ones: a forward pass is saved."""
    assert not maker().needs_old_log_probs
    assert not maker(critic__freezing_steps=1).needs_old_log_probs, "without a critic nothing warms up"


@pytest.mark.notices(
    "tokens of older weights are compared with the weights of now",
    "rl/experience.py",
    '"weight_version") == version',
    '"weight_version") >= 0',
)
@pytest.mark.notices("the distance of stale tokens is that of all tokens", "rl/experience.py", "mask & ~is_new", "mask")
def test_only_tokens_that_the_present_weights_wrote_are_compared_with_the_engine():
    """Weights 4 wrote the first sample, 5 the second: the policy is at 5, where the two sides differ by 2e-5."""
    made = [Trajectory.start(prompt(), 0, sample) for sample in range(2)]
    for version, one in zip((4, 5), made, strict=True):
        one.append_model(np.array([7]), np.array([-1.0], np.float32), version)
    batch = to_batch(made)
    batch = replace(batch, old_log_probs=torch.tensor([9, 9, -3.0, 9, 9, -1.00002]))
    found = maker().mismatch(batch, version=5)
    assert found["mismatch/mean"] == found["mismatch/max"] == pytest.approx(2e-5, rel=0.02)
    assert found["async/policy_gap_mean"] == found["async/policy_gap_max"] == 2
    assert found["async/policy_gap_kl"] == pytest.approx(math.exp(-2) - 1 + 2)
    stale = maker().mismatch(batch, version=6)
    assert {*stale} == {"async/policy_gap_mean", "async/policy_gap_max", "async/policy_gap_kl"}
    assert stale["async/policy_gap_mean"] == pytest.approx((2 + 2e-5) / 2)


class Asked:
    """In place of a worker group: says -1 of each token that the model wrote, as the engine did, and as its entropy 2
    more; keeps what it was asked."""

    name, mesh = "actor", Mesh(1)

    def __init__(self) -> None:
        self.asked = []

    def start_sharded(self, method, shards, *numbers):
        self.asked.append((method, *numbers))
        said = [-shard.mask for shard in shards]
        return [torch.stack([each, each + 2], 1) for each in said] if method == "log_probs_and_entropies" else said

    def wait(self, refs, what):
        return refs


def made(**flags) -> tuple[ExperienceMaker, ScoredTrajectories]:
    """A maker with a policy and a reference; two samples with shaped rewards beside their scores."""
    answers = [Trajectory.start(prompt(), 0, sample) for sample in range(2)]
    for one in answers:
        one.append_model(np.array([7]), np.array([-1.0], np.float32), 3)
    rewards, scores = np.array([0.5, -0.25], np.float32), np.array([1.0, 0.0], np.float32)
    both = maker(PolicyGroup(Asked()), ReferenceGroup(Asked()), **flags)
    return both, ScoredTrajectories(answers, rewards, scores, [], [])


@pytest.mark.notices(
    "log-probs of the rollout are those of temperature 1",
    "rl/experience.py",
    "algo, temperature, mismatch_limit\n",
    "algo, 1.0, mismatch_limit\n",
)
def test_every_model_reads_the_samples_at_the_temperature_that_wrote_them():
    maker, samples = made(rollout__temperature=0.7)
    maker.make(samples, version=3)
    assert maker.policy.group.asked == maker.reference.group.asked == [("log_probs", 0.7)]


@pytest.mark.notices(
    "entropies of tokens are taken for their log-probs",
    "rl/experience.py",
    'columns["old_log_probs"], columns["entropies"] =',
    'columns["entropies"], columns["old_log_probs"] =',
)
def test_entropies_come_with_the_log_probs_of_the_same_forward_pass():
    maker, samples = made(rollout__token_entropy=True)
    batch, _ = maker.make(samples, version=3)
    assert [method for method, _ in maker.policy.group.asked] == ["log_probs_and_entropies"]
    assert batch.old_log_probs.tolist() == [0, 0, -1] * 2 and batch.entropies.tolist() == [2, 2, 1] * 2


@pytest.mark.notices(
    "an estimator that needs entropies gets none",
    "rl/experience.py",
    'token_entropy or algo.advantage.needs("entropies")',
    "token_entropy",
)
def test_an_estimator_that_needs_entropies_gets_them(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from rlhf_suite.algo.advantage import Credit\n"
        "from rlhf_suite.registry import estimator\n"
        "@estimator(needs=('rewards', 'entropies'))\n"
        "def spread(inputs, config):\n"
        "    return Credit(inputs.entropies, inputs.entropies)\n"
    )
    maker, samples = made(algo__advantage__estimator=f"{own}:spread")
    batch, _ = maker.make(samples, version=3)
    credit, _ = CreditAssigner(maker.algo).assign(batch)
    assert credit.advantages.tolist() == [0, 0, 1] * 2


@pytest.mark.notices(
    "the score is trained on, without penalties",
    "rl/experience.py",
    "torch.from_numpy(scored.rewards)",
    "torch.from_numpy(scored.scores)",
)
def test_shaped_rewards_are_learned_from():
    maker, samples = made()
    batch, _ = maker.make(samples, version=3)
    assert batch.reward.tolist() == [0.5, -0.25]
    found = {"old_log_probs", "ref_log_probs", "engine_log_probs", "mask", "owner", "weight_version"}
    assert found == batch.columns("token").keys()
