"""Reserving devices from a real cluster of two CPUs."""

import pytest
import ray
from ray.util import remove_placement_group

from rlhf_suite.config.plan.placement import Placement, Pool, Role
from rlhf_suite.errors import RunError
from rlhf_suite.launch.placement import reserve, resources


@pytest.mark.notices(
    "shares of a device are rounded up",
    "launch/placement.py",
    "math.floor(amount * RESOURCE_STEPS + 1e-6)",
    "math.ceil(amount * RESOURCE_STEPS)",
)
def test_shares_of_a_device_fit_in_it_again():
    for sharers in range(1, 12):
        part, whole = resources("cuda", 1 / sharers), resources("cuda", 1)
        assert part["GPU"] * sharers <= whole["GPU"]
        assert part["CPU"] * sharers <= whole["CPU"]
        assert part["GPU"] * sharers > 0.99


def test_a_device_without_gpu_is_a_share_of_cpu():
    assert resources("cpu", 1) == {"CPU": 0.25}
    assert resources("cuda", 2) == {"CPU": 0.5, "GPU": 2.0}


@pytest.mark.notices(
    "roles that share a device take all of it", "config/plan/placement.py", "return 1 / len(self.roles)", "return 1.0"
)
def test_the_roles_of_a_pool_divide_its_devices():
    pool = Pool((Role("engine", 2, 4), Role("actor", 8)))
    assert (pool.share, pool.num_devices, pool.name) == (0.5, 8, "engine+actor")
    placement = Placement("cuda", (pool, Pool((Role("ref", 3),))))
    assert (placement.num_devices, placement.num_actors) == (11, 13)
    assert placement.lines() == ["8 x GPU: engine x 2 of 4, actor x 8", "3 x GPU: ref x 3"]


@pytest.mark.usefixtures("cluster")
def test_roles_of_a_pool_share_bundles_and_others_do_not():
    placement = Placement("cpu", (Pool((Role("actor", 2), Role("ref", 2))), Pool((Role("engine", 1),))))
    slots = reserve(placement, timeout_s=20)
    assert {name: len(found) for name, found in slots.items()} == {"actor": 2, "ref": 2, "engine": 1}
    assert slots["actor"] == slots["ref"]
    assert {slot.bundle for slot in slots["actor"]} == {0, 1}
    assert slots["engine"][0].group != slots["actor"][0].group
    assert slots["actor"][0].num_cpus == 0.125
    nap = ray.remote(lambda: "ran")
    assert (
        ray.get([nap.options(**s.options()).remote() for found in slots.values() for s in found], timeout=30)
        == ["ran"] * 5
    )
    for group in {slots["actor"][0].group.id: slots["actor"][0].group, "engine": slots["engine"][0].group}.values():
        remove_placement_group(group)


@pytest.mark.usefixtures("cluster")
def test_a_split_engine_sits_on_the_devices_of_its_ranks():
    (slots,) = [reserve(Placement("cpu", (Pool((Role("actor", 4), Role("engine", 2, 2))),)), timeout_s=20)]
    assert [slot.bundle for slot in slots["actor"]] == [0, 1, 2, 3]
    assert [slot.bundle for slot in slots["engine"]] == [0, 2]
    assert {slot.num_cpus for slot in [*slots["actor"], *slots["engine"]]} == {0.125}
    remove_placement_group(slots["actor"][0].group)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("cluster")
def test_devices_the_cluster_does_not_have_are_named_at_once():
    with pytest.raises(RunError, match=r"needs 4 GPUs, the cluster has 0 \(4 x GPU: actor x 4\).*colocate_all"):
        reserve(Placement("cuda", (Pool((Role("actor", 4),)),)), timeout_s=3600)
    with pytest.raises(RunError, match=r"needs 16 CPUs, the cluster has 2 .*launch\.num_cpus"):
        reserve(Placement("cpu", (Pool((Role("actor", 64),)),)), timeout_s=3600)


@pytest.mark.usefixtures("cluster")
def test_devices_that_others_hold_are_waited_for_until_the_deadline():
    (held,) = reserve(Placement("cpu", (Pool((Role("other", 6),)),)), timeout_s=20)["other"][:1]
    with pytest.raises(
        RunError,
        match=r"devices of actor within 1 s \(launch\.timeout_s\): it needs 1 CPUs, and 0\.5 are free now\. Wait",
    ):
        reserve(Placement("cpu", (Pool((Role("actor", 4),)),)), timeout_s=1)
    remove_placement_group(held.group)
