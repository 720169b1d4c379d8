"""A metric is a number over something: over no tokens, pairs, samples or requests there is none, and never a 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from given import prompt
from rlhf_suite.algo.correction import CorrectionInput, correction_metrics, mismatch
from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig, DistillTermConfig
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.data.trajectory import Experience, Trajectory, to_batch
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.losses.metrics import Metric
from rlhf_suite.losses.policy import PolicyTokens, entropy_term, kl_term, policy_term
from rlhf_suite.losses.preference import Answers, kto_loss, preference_term, reward_term
from rlhf_suite.losses.tokens import next_token_loss, step_loss, step_ranking, value_loss
from rlhf_suite.registry import estimator, policy_loss
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.pipeline import staleness
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.tracking.timeline import Timeline

NOTHING, ONES = torch.zeros(4), torch.ones(4)
WORLD = World(0, Mesh(1), torch.device("cpu"))


def silent() -> Experience:
    """Two samples in which the model wrote nothing, with all columns."""
    batch = to_batch([Trajectory.start(prompt(), 0, sample) for sample in range(2)])
    names = ("old_log_probs", "ref_log_probs", "teacher_log_probs", "values")
    columns = {name: torch.full((4,), -1.0) for name in names}
    return replace(batch, **columns, reward=torch.tensor([1.0, 0.0]), greedy=torch.zeros(2))


def losses() -> dict[str, dict[str, Metric]]:
    """The metrics of every loss of which nothing counts: no token, pair, answer or step."""
    tokens = PolicyTokens(ONES, ONES, ONES, NOTHING, torch.zeros(4, dtype=torch.int64), 1, chosen=NOTHING.bool())
    answers, steps = Answers(-ONES, -ONES, ONES), torch.zeros(0, dtype=torch.int64)
    found = {
        name: policy_term(tokens, ActorConfig.of("ppo", policy_loss_type=name), NOTHING, NOTHING.sum())
        for name in policy_loss.names()
    }
    found |= {
        "kl": kl_term(ONES, NOTHING, 1.0),
        "entropy": entropy_term(ONES, NOTHING, 1.0),
        "value": value_loss(ONES, ONES, ONES, NOTHING, (1.0, 1.0)),
        "next token": next_token_loss(-ONES, NOTHING),
        "preference": preference_term(answers, answers, NOTHING, AlgoConfig.of("dpo")),
        "reward": reward_term(ONES, NOTHING, NOTHING, NOTHING, "sigmoid"),
        "kto": kto_loss(ONES, ONES, ONES, NOTHING, AlgoConfig.of("kto")),
        "step": step_loss(torch.zeros(0, 2), steps, steps.float()),
    }
    ranking = {"auc": step_ranking(torch.zeros(0, 2), steps, steps.float())}
    return {name: {**loss.metrics} for name, loss in found.items()} | {"ranking": ranking}


@pytest.mark.parametrize(("name", "metrics"), losses().items())
def test_a_loss_over_nothing_says_nothing(name, metrics):
    assert metrics and WORLD.combine({key: metric.exact() for key, metric in metrics.items()}) == {}


@pytest.mark.notices(
    "a mean over no tokens is 0",
    "rl/credit.py",
    "masked_sum(column, mask) / count) for name, column in values.items()} if count > 0 else {}",
    "masked_sum(column, mask) / count.clamp(min=1)) for name, column in values.items()}",
)
@pytest.mark.parametrize("name", sorted(set(estimator.names())))
def test_credit_of_samples_without_tokens_says_nothing_about_tokens(name):
    advantage = AdvantageConfig(estimator=name, clip_range=[-1.0, 1.0], reward_parts=["answer"])
    config = AlgoConfig.of("ppo", advantage=advantage, distill=DistillTermConfig(coef=1.0))
    credit = CreditAssigner(config)
    _, metrics = credit.assign(silent(), [{"answer": 1.0}, {}])
    assert set(metrics) == {"train/kl_coef", "train/return"}, "the rewards are there, and no token"
    credit.adapt(metrics, 2)  # a controller of beta learns nothing from it


def test_a_rollout_without_tokens_has_no_distances_and_no_age():
    batch = silent()
    given = CorrectionInput(batch.old_log_probs, batch.engine_log_probs, batch.mask, batch.lengths)
    assert mismatch(batch.engine_log_probs, batch.old_log_probs, batch.mask) is None
    assert correction_metrics(given, batch.mask) == {} == staleness(batch, 3)


@pytest.mark.notices(
    "one sample has a spread", "rl/sample_metrics.py", "    if len(groups) > 1:\n", "    if len(groups) > 0:\n"
)
def test_one_sample_has_no_spread():
    one = Trajectory.start(prompt(), 0, 0)
    one.append_model(np.array([7]), np.array([-1.0], np.float32), 0)
    numbers = np.array([1.0], np.float32)
    found = sample_metrics(ScoredTrajectories([one], numbers, numbers, [""], [""], extra=[{}]))
    assert not [key for key in found if key.endswith("_std")] and found["train/reward"] == 1


def test_a_step_in_which_nobody_was_busy_has_no_overlap(tmp_path: Path):
    assert set(Timeline().close_window(tmp_path / "timeline.jsonl")) == {"perf/engine_idle", "perf/trainer_idle"}
