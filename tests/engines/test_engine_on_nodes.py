"""A real engine whose two workers are on two nodes: a Ray cluster on one machine, each node of which counts one GPU.
The engine itself computes on the CPU."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import ray
import torch
from probed_engines import MAX_LEN, ProbedEngine, Trainer, checkpoint, gap, make_model, requests

from ray_nodes import ray_nodes
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.config.plan.placement import Placement, Pool, Role
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.engines.start import engine_env
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.environment import runtime_env
from rlhf_suite.launch.placement import Slot, reserve
from rlhf_suite.weight_sync.digests import WeightSyncError

pytestmark = pytest.mark.proof
NODE = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def slot():
    """That of an engine with a device of each node."""
    with ray_nodes(NODE, NODE):
        (slot,) = reserve(Placement("cuda", (Pool((Role("engine", 1, 2),)),)), timeout_s=60)["engine"]
        yield slot


def start(slot: Slot, folder, backend: str) -> EnginePool:
    """An engine that gets its first weights from a sync and may be started again once."""
    config = VLLMConfig.of("ppo", kv_cache_mb=32, tensor_parallel_size=2, max_restarts=1)
    spec = EngineSpec(str(folder / "split"), "float32", "cpu", MAX_LEN, 0, config, backend, load_weights=False)
    make_model("split", seed=1).save_pretrained(folder / "split")
    environment = {"env_vars": runtime_env("cpu") | engine_env("cpu")}
    member = Member("engine-0", folder / "engine-0.log")

    def create(*_):
        engine = ray.remote(ProbedEngine).options(**slot.options(), runtime_env=environment)
        return engine.remote(spec, member.log, slot.gpus, slot.workers)

    return EnginePool([create()], [member], 300, create, config.max_restarts)


@pytest.mark.notices(
    "an engine on nodes: workers of two machines sum through the memory of one",
    "engines/nodes.py",
    'f"{meeting}?node={self.node()}"',
    "meeting",
)
@pytest.mark.notices(
    "an engine on nodes: a dead worker leaves the engine alive",
    "engines/nodes.py",
    "            except RayActorError:\n                return True",
    "            except RayActorError:\n                return False",
)
def test_an_engine_on_two_nodes_samples_proves_its_weights_and_is_started_again(slot, tmp_path):
    pool, trainer = start(slot, tmp_path, "gloo"), Trainer.remote()
    (handle,), asked = pool._handles, requests(4)
    member = Member("trainer", tmp_path / "trainer.log")
    assert len({*ray.get(handle.places.remote())}) == 2, "the workers are on one node"
    assert len({*ray.get(handle.names_of_memory.remote())}) == 2, "they would sum through memory of one machine"
    meet = partial(pool.connect, "127.0.0.1", ray.get(trainer.port.remote()), trainer.connect.remote, member)
    meet()
    for version, seed in ((1, 1), (2, 5)):
        model = make_model("split", seed)
        weights = dict(checkpoint(model))
        publish = partial(trainer.publish.remote, version, weights)
        _, (report,) = pool.sync("gloo", version, lambda: [publish()], [member])  # noqa: B023
        assert report.received == report.read_back == len(weights), report.not_readable
        answers = pool.generate_all(asked)
        assert gap(model, asked, answers) < 1e-6
    assert (tmp_path / "engine-0-worker-1.log").exists()

    ray.get(handle.perturb_last_worker.remote("model.norm.weight"))
    with pytest.raises(WeightSyncError, match=r"tensor model\.norm\.weight .* differs in .* after loading"):
        ray.get(handle.attest.remote())

    def send_again(published) -> None:
        meet()
        pool.stream(3, lambda: [trainer.publish.remote(3, weights)], [member])

    pool.send_again = send_again
    os.kill(ray.get(handle.workers.remote())[1], signal.SIGKILL)
    for mine, theirs in zip(pool.generate_all(asked), answers, strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist()
        torch.testing.assert_close(torch.tensor(mine.log_probs), torch.tensor(theirs.log_probs), rtol=0, atol=1e-6)
    assert pool.restarts == 1
    pool.close()
