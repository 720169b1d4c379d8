"""Actors that die alone and with their node, in a real Ray cluster of two nodes on one machine."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from ray_nodes import ray_nodes
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.link import Restarts
from rlhf_suite.launch.wait import ActorDied, wait_for

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@ray.remote(num_cpus=0, resources={"second": 1})
class Waiter:
    """An actor on the second node. Its methods run in the order in which they are called."""

    def process(self) -> int:
        return os.getpid()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self) -> None:
        signal.pause()


@pytest.fixture
def cluster():
    with ray_nodes(NODE) as nodes:
        yield nodes


@pytest.mark.notices(
    "an engine is started again on a node that is gone",
    "launch/link.py",
    "if not self.limit or has_lost_its_node(death.actor_id):",
    "if not self.limit:",
)
@pytest.mark.notices(
    "an engine that died alone is not started again",
    "launch/lost_nodes.py",
    'if not node["Alive"] or not answers(node)]',
    "]",
)
def test_an_actor_is_started_again_unless_its_node_is_lost(cluster, tmp_path):
    second = cluster.add_node(resources={"second": 2}, **NODE)
    members = [Member(name, tmp_path / f"{name}.log") for name in ("engine-0", "engine-1")]
    alone, with_node = Waiter.remote(), Waiter.remote()
    ray.get([alone.process.remote(), with_node.process.remote()], timeout=60)
    restarts = Restarts(2, 3, "vllm.max_restarts")
    with pytest.raises(ActorDied, match="engine-0 died during a nap") as death:
        wait_for([alone.die.remote()], "a nap", 60, members[:1])
    restarts.count(0, death.value)
    nap = with_node.sleep.remote()
    cluster.remove_node(second, allow_graceful=False)
    with pytest.raises(ActorDied, match="engine-1 died during a nap") as death:
        wait_for([nap], "a nap", 60, members[1:])
    with pytest.raises(ActorDied, match="engine-1 died during a nap"):
        restarts.count(1, death.value)
    assert restarts.counts == [1, 0]
