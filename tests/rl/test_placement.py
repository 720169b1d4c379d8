"""Which roles a configuration has and how they share devices: arithmetic, without Ray."""

import pytest

from rlhf_suite.config.runs import PPORun
from rlhf_suite.errors import UserError
from rlhf_suite.launch.run_placement import plan, settled, sync_backend


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


def test_roles_share_the_gpu_of_a_machine_that_has_too_few(config):
    config.algo.kl.init_coef = 0.01
    alone, one = settled(config, "cuda", 3), settled(config, "cuda", 1)
    assert plan(alone, "cuda").lines() == ["1 x GPU: actor x 1", "1 x GPU: engine x 1", "1 x GPU: ref x 1"]
    assert plan(one, "cuda").lines() == ["1 x GPU: actor x 1, engine x 1, ref x 1"]
    assert (alone.vllm.gpu_memory_utilization, one.vllm.gpu_memory_utilization) == (None, 0.4)


def test_nobody_is_made_to_share_what_is_not_known_or_not_equal_or_forbidden(config):
    assert not settled(config, "cuda", None).train.colocate_all
    assert not settled(config, "cpu", 0).train.colocate_all
    config.vllm.num_engines = 2
    assert not settled(config, "cuda", 1).train.colocate_all
    config.vllm.num_engines, config.train.colocate_all = 1, False
    assert not settled(config, "cuda", 1).train.colocate_all


def test_an_engine_that_shares_its_gpu_takes_what_it_is_told_to(config):
    config.train.colocate_all, config.vllm.gpu_memory_utilization = True, 0.6
    assert settled(config, "cuda", 8).vllm.gpu_memory_utilization == 0.6


def test_the_ranks_of_all_nodes_count_for_every_role(config):
    config.algo.kl.init_coef = 0.01
    config.algo.advantage.estimator = "gae"
    for section in (config.actor, config.ref, config.critic):
        section.num_nodes, section.num_gpus_per_node = 2, 3
    assert sizes(config) == [[("actor", 6)], [("engine", 1)], [("ref", 6)], [("critic", 6)]]


@pytest.mark.parametrize(
    ("device", "nodes", "colocate", "backend"),
    [("cpu", 1, False, "shm"), ("cpu", 2, False, "gloo"), ("cuda", 1, False, "nccl"), ("cuda", 2, True, "ipc")],
)
def test_weights_go_through_memory_only_where_trainer_and_engines_share_it(config, device, nodes, colocate, backend):
    config.actor.num_nodes, config.train.colocate_all = nodes, colocate
    assert sync_backend(config, device) == backend
    config.vllm.sync_backend = "gloo"
    assert sync_backend(config, device) == "gloo"
