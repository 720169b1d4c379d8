"""Reserving GPUs from a real cluster that counts six of them. No process touches one, so the machine needs none."""

import os

import pytest
import ray

from rlhf_suite.config.plan import Placement, Pool, Role
from rlhf_suite.launch.placement import reserve


@pytest.fixture(scope="module")
def cluster():
    """Ray counts no more GPUs than CUDA_VISIBLE_DEVICES names, and a machine without any may set it to nothing."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=80 << 20,
            num_cpus=2,
            num_gpus=6,
            log_to_driver=False,
        )
    yield
    ray.shutdown()


@ray.remote
class Actor:
    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


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
