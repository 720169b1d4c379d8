"""Which roles a configuration has and how they share devices: arithmetic, without Ray."""

import pytest

from rlhf_suite.config.runs import PPORun
from rlhf_suite.errors import UserError
from rlhf_suite.rl.placement import plan


def sizes(config: PPORun) -> list[list[tuple[str, int]]]:
    return [[(role.name, role.num_actors) for role in pool.roles] for pool in plan(config, "cpu").pools]


@pytest.fixture
def config() -> PPORun:
    config = PPORun()
    config.algo.advantage.estimator = "group_norm"
    config.algo.kl.init_coef = 0.0
    config.reward.rule = "exact_match"
    return config


def test_only_the_roles_that_are_needed_exist(config):
    assert sizes(config) == [[("actor", 1)], [("engine", 1)]]
    config.algo.kl.init_coef = 0.01
    config.algo.advantage.estimator = "gae"
    config.reward.model_name_or_path = "some/model"
    assert sizes(config) == [[("actor", 1)], [("engine", 1)], [("ref", 1)], [("critic", 1)], [("reward", 1)]]


def test_separate_placement_adds_devices_up(config):
    config.actor.num_nodes, config.actor.num_gpus_per_node = 2, 4
    config.vllm.num_engines, config.vllm.tensor_parallel_size = 3, 2
    placed = plan(config, "cuda")
    assert placed.num_devices == 2 * 4 + 3 * 2
    assert placed.num_actors == 8 + 3
    assert placed.lines() == ["8 x GPU: actor x 8", "6 x GPU: engine x 3 of 2"]


def test_colocation_of_all_puts_every_role_on_the_same_devices(config):
    config.algo.kl.init_coef = 0.01
    config.train.colocate_all = True
    config.actor.num_gpus_per_node = config.ref.num_gpus_per_node = config.vllm.num_engines = 2
    placed = plan(config, "cuda")
    assert placed.lines() == ["2 x GPU: actor x 2, engine x 2, ref x 2"]
    assert placed.num_devices == 2
    assert placed.pools[0].share == pytest.approx(1 / 3)


def test_pairs_share_devices(config):
    config.algo.kl.init_coef = 0.01
    config.algo.advantage.estimator = "gae"
    config.reward.model_name_or_path = "some/model"
    config.train.colocate_actor_ref = config.train.colocate_critic_reward = True
    assert sizes(config) == [[("actor", 1), ("ref", 1)], [("critic", 1), ("reward", 1)], [("engine", 1)]]


def test_a_pair_with_an_absent_partner_is_alone(config):
    config.train.colocate_actor_ref = config.train.colocate_critic_reward = True
    assert sizes(config) == [[("actor", 1)], [("engine", 1)]]


def test_roles_of_different_size_cannot_share(config):
    config.train.colocate_all = True
    config.actor.num_gpus_per_node = 4
    with pytest.raises(
        UserError, match=r"train\.colocate_all=true .*actor\.num_gpus_per_node = 4, vllm\.num_engines = 1"
    ):
        plan(config, "cuda")


def test_engines_over_several_devices_cannot_share(config):
    config.train.colocate_all = True
    config.vllm.tensor_parallel_size = 2
    with pytest.raises(UserError, match=r"vllm\.tensor_parallel_size=2.*vllm\.tensor_parallel_size=1"):
        plan(config, "cuda")
