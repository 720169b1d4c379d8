"""Episodes of several ledgers, trained on by one rank and by two, which have different ledgers of an episode."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from plain_run import small
from test_forked_episodes import experience, forked, other, whole

from rlhf_suite.config.plan.run_plan import ACTOR, Machine, resolve
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.rl.roles import PolicyRole, WorkerSettings
from rlhf_suite.rl.sharding import balanced_parts, split
from rlhf_suite.rl.update import step_indices

FLAGS = {
    "algo__kl__init_coef": 0.0,
    "algo__kl__target": None,
    "actor__adam__eps": 1e-3,  # larger than the rounding of small gradients, which Adam would magnify
    "ds__zero_stage": 2,
}


def steps():
    """A rollout, and the ledgers of two optimiser steps, of three episodes and of two."""
    trajectories = [*forked(0), *whole(1), *other(2), *forked(3), *forked(4)]
    batch = experience(trajectories, [1.0, 1.0, 0.5, 0.0, 2.0, 2.0, -1.0, -1.0], "rloo")
    return batch, [batch.ledgers_of(chosen) for chosen in step_indices(batch.num_episodes, 3, 1, (0, 0))]


def updated(world, config) -> tuple[dict[str, float], torch.Tensor]:
    """Return the metrics of these steps on the share of this rank, and the weights."""
    plan = resolve(config, Machine("cpu", 0))
    settings = WorkerSettings(config.ds, config.train, config.rollout, config.data, plan.models[ACTOR].path)
    rank = Rank(world.rank, world.mesh, "127.0.0.1", 0, "cpu")
    policy = PolicyRole(rank, plan.models[ACTOR], settings, config.actor, config.algo.kl, 4)
    metrics = policy.update(split(*steps(), world.mesh.data)[world.data_index], 0, 0.0, None)
    return metrics, torch.cat([each.detach().flatten() for each in policy.model.module.parameters()])


def test_an_episode_of_these_steps_is_on_both_ranks():
    batch, chosen = steps()
    parts = [[{*batch.episode[part].tolist()} for part in balanced_parts(batch, 2, step)] for step in chosen]
    assert any(first & second for first, second in parts)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_two_ranks_take_the_optimiser_steps_of_one(ranks, mode):
    config = small(**FLAGS, actor__loss_agg_mode=mode)
    ((metrics, weights),) = ranks(1).call(updated, config)
    both = ranks(2).call(updated, config)
    for found, of_rank in both:
        for name in ("train/policy_loss", "train/actor_grad_norm"):
            assert found[name] == pytest.approx(metrics[name], rel=1e-5), name
        assert float((of_rank - weights).abs().max()) < 1e-6
    assert len({*chain(weights.tolist())}) > 1
