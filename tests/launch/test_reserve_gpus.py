"""Reserving GPUs from a real cluster that counts six of them. No process touches one, so the machine needs none."""

import os

import pytest
import ray
from ray.util import remove_placement_group

from local_ray import local_ray
from rlhf_suite.config.plan.placement import Placement, Pool, Role
from rlhf_suite.launch.placement import reserve, show_own_gpus


@pytest.fixture(scope="module")
def cluster():
    """Ray counts no more GPUs than CUDA_VISIBLE_DEVICES names, and a machine without any may set it to nothing."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with local_ray(num_cpus=2, num_gpus=6, log_to_driver=False):
            yield


@ray.remote
class Actor:
    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.notices(
    "an engine is told the first of its GPUs alone",
    "launch/placement.py",
    "return replace(first, gpus=here)",
    "return first",
)
@pytest.mark.usefixtures("cluster")
def test_a_split_engine_is_told_the_gpus_of_the_ranks_that_it_shares_them_with():
    pools = (Pool((Role("other", 2),)), Pool((Role("actor", 4), Role("engine", 2, 2), Role("ref", 4))))
    slots = reserve(Placement("cuda", pools), timeout_s=30)
    actors = {name: [Actor.options(**slot.options()).remote() for slot in slots[name]] for name in slots}
    seen = {name: ray.get([actor.gpus.remote() for actor in each], timeout=60) for name, each in actors.items()}
    assert len({*seen["actor"], *seen["other"]}) == 6
    assert seen["actor"] == seen["ref"]
    assert [list(slot.gpus) for slot in slots["engine"]] == [seen["actor"][:2], seen["actor"][2:]]
    assert seen["engine"] == [seen["actor"][0], seen["actor"][2]], "Ray itself gives an engine the first one alone"
    assert all(slot.gpus == () for slot in slots["actor"])
    release(slots)


def release(slots) -> None:
    """Give the devices back."""
    for group in {slot.group.id: slot.group for each in slots.values() for slot in each}.values():
        remove_placement_group(group)


@ray.remote
class Shown:
    def gpus(self, own: tuple[str, ...]) -> tuple[str | None, str | None]:
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        show_own_gpus(own)
        return before, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("cluster")
def test_actors_see_their_own_gpus_where_ray_is_told_to_leave_that_to_them():
    """Without a remedy each of them would see all GPUs and use the first one."""
    reserved = reserve(Placement("cuda", (Pool((Role("actor", 2),)),)), timeout_s=30)
    slots = reserved["actor"]
    told = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    left = [Shown.options(**slot.options(), runtime_env=told).remote() for slot in slots]
    seen = ray.get([actor.gpus.remote(()) for actor in left], timeout=60)
    assert all(before is None for before, _ in seen), "Ray left it alone"
    assert len({own for _, own in seen}) == 2 and all(own and own.isdigit() for _, own in seen)
    assert ray.get(left[0].gpus.remote(("4", "5")), timeout=60)[1] == "4,5", "a split engine"
    for actor in left:
        ray.kill(actor)
    before, own = ray.get(Shown.options(**slots[0].options()).remote().gpus.remote(()), timeout=60)
    assert before == own == seen[0][1], "Ray has done it"
    release(reserved)
