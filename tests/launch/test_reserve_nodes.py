"""Reserving devices from a real Ray cluster of two nodes on one machine, each of which counts three GPUs."""

import pytest
from ray.util import placement_group_table, remove_placement_group

from ray_nodes import ray_nodes
from rlhf_suite.config.plan.placement import Placement, Pool, Role
from rlhf_suite.errors import RunError
from rlhf_suite.launch.placement import reserve

NODE = {"num_cpus": 2, "num_gpus": 3, "object_store_memory": 80 << 20}
SHARED = (Role("actor", 6, num_nodes=2), Role("engine", 3, 2))


@pytest.fixture(scope="module", autouse=True)
def nodes():
    with ray_nodes(NODE, NODE):
        yield


@pytest.mark.parametrize("size", [2, 3])
def test_each_engine_is_on_one_node_and_several_are_on_both(size):
    slots = reserve(Placement("cuda", (Pool((Role("engine", 2, size),)),)), timeout_s=60)["engine"]
    node_of = placement_group_table(slots[0].group)["bundles_to_node_id"]
    assert len({node_of[slot.bundle] for slot in slots}) == 2
    assert {slot.num_gpus for slot in slots} == {size}
    remove_placement_group(slots[0].group)


@pytest.mark.notices(
    "an engine on nodes: the engine takes the device of its first worker",
    "launch/placement.py",
    "replace(first, num_cpus=0.0, num_gpus=0.0, gpus=here, workers=workers)",
    "replace(first, gpus=here, workers=workers)",
)
@pytest.mark.notices(
    "an engine on nodes: a worker is told the GPUs of all nodes",
    "launch/placement.py",
    "gpus=gpus[node]) for slot, node in zip(",
    "gpus=sum(gpus.values(), ())) for slot, node in zip(",
)
def test_an_engine_larger_than_a_node_has_a_worker_on_each_of_its_devices():
    """The engine itself takes no device. A worker is told the engine's GPUs of its own node."""
    (slot,) = reserve(Placement("cuda", (Pool((Role("engine", 1, 4),)),)), timeout_s=60)["engine"]
    node_of = placement_group_table(slot.group)["bundles_to_node_id"]
    nodes = [node_of[worker.bundle] for worker in slot.workers]
    assert nodes == sorted(nodes)
    assert (len(nodes), len({*nodes}), slot.num_gpus, slot.num_cpus) == (4, 2, 0, 0)
    assert {worker.num_gpus for worker in slot.workers} == {1}
    for worker, node in zip(slot.workers, nodes, strict=True):
        assert len({*worker.gpus}) == len(worker.gpus) == nodes.count(node)
    assert (slot.bundle, slot.gpus) == (slot.workers[0].bundle, slot.workers[0].gpus)
    remove_placement_group(slot.group)


def test_an_engine_on_two_nodes_shares_the_devices_of_ranks():
    slots = reserve(Placement("cuda", (Pool((Role("actor", 6), Role("engine", 1, 6))),)), timeout_s=60)
    (slot,), ranks = slots["engine"], slots["actor"]
    assert [worker.bundle for worker in slot.workers] == [rank.bundle for rank in ranks]
    assert {worker.num_gpus for worker in slot.workers} == {rank.num_gpus for rank in ranks} == {0.5}
    remove_placement_group(slot.group)


def test_an_engine_larger_than_all_nodes_is_refused_at_once():
    with pytest.raises(RunError, match="the run needs 7 GPUs, the cluster has 6"):
        reserve(Placement("cuda", (Pool((Role("engine", 1, 7),)),)), timeout_s=3600)


@pytest.mark.notices(
    "ranks of all nodes are packed on the first ones",
    "launch/placement.py",
    "for _ in range(pool.num_nodes or 1):",
    "for _ in range(1):",
)
@pytest.mark.notices(
    "an engine that a node could hold is spread over two without a word",
    "launch/placement.py",
    "if len(slots) <= max(per_node.values()):",
    "if len(slots) < 0:",
)
def test_an_engine_that_a_node_could_hold_is_not_spread_over_two():
    with pytest.raises(RunError, match=r"the 2 devices of an engine would be on two nodes, .* got 3, 3 devices"):
        reserve(Placement("cuda", (Pool(SHARED),)), timeout_s=60)


def test_ranks_are_spread_over_as_many_nodes_as_the_flag_says():
    """Two devices would fit on one of the nodes, and four on three of one and one of the other."""
    pools = (Pool((Role("ref", 2, num_nodes=2),)), Pool((Role("actor", 4, num_nodes=2),)))
    slots = reserve(Placement("cuda", pools), timeout_s=60)
    nodes = {name: [node_of(slot) for slot in each] for name, each in slots.items()}
    assert nodes["ref"][0] != nodes["ref"][1]
    assert nodes["actor"][0] == nodes["actor"][1] != nodes["actor"][2] == nodes["actor"][3]
    for group in {slot.group.id: slot.group for each in slots.values() for slot in each}.values():
        remove_placement_group(group)


@pytest.mark.notices(
    "the ranks of the next node may be on the same one",
    "launch/placement.py",
    "if taken else None",
    "if taken and False else None",
)
def test_ranks_wait_for_as_many_nodes_also_where_one_has_room_for_all():
    (held, *_) = reserve(Placement("cuda", (Pool((Role("other", 3, num_nodes=1),)),)), timeout_s=60)["other"]
    with pytest.raises(RunError, match=r"not reserved the devices of actor within 3 s"):
        reserve(Placement("cuda", (Pool((Role("actor", 2, num_nodes=2),)),)), timeout_s=3)
    remove_placement_group(held.group)


def node_of(slot) -> str:
    return placement_group_table(slot.group)["bundles_to_node_id"][slot.bundle]


def test_ranks_of_one_node_are_on_one_and_more_than_it_has_are_refused_at_once():
    slots = reserve(Placement("cuda", (Pool((Role("actor", 3, num_nodes=1),)),)), timeout_s=60)["actor"]
    assert len({node_of(slot) for slot in slots}) == 1
    remove_placement_group(slots[0].group)
    with pytest.raises(RunError, match=r"actor needs 4 GPUs on each of 1 nodes, .*, and 0 of the cluster's 2 nodes"):
        reserve(Placement("cuda", (Pool((Role("actor", 4, num_nodes=1),)),)), timeout_s=3600)
    with pytest.raises(RunError, match=r"actor needs 1 GPUs on each of 3 nodes"):
        reserve(Placement("cuda", (Pool((Role("actor", 3, num_nodes=3),)),)), timeout_s=3600)
