"""Real engines on GPUs: one process, worker processes of vLLM, and workers that are Ray actors, as on several nodes."""

from __future__ import annotations

import pytest
import torch

ray = pytest.importorskip("ray")
pytest.importorskip("vllm")

from probed_engines import MAX_LEN, gap, make_model, requests  # noqa: E402 - it needs them

from local_ray import local_ray  # noqa: E402
from rlhf_suite.config.declarations.rollout import VLLMConfig  # noqa: E402
from rlhf_suite.config.plan.placement import Placement, Pool, Role  # noqa: E402
from rlhf_suite.engines.pool import EnginePool  # noqa: E402
from rlhf_suite.engines.spec import EngineSpec  # noqa: E402
from rlhf_suite.engines.start import start  # noqa: E402
from rlhf_suite.launch.placement import Slot, reserve  # noqa: E402

pytestmark = pytest.mark.gpu
BF16_GAP = 0.05  # of a log-prob, on average


@pytest.fixture(scope="module")
def gpus():
    with local_ray():
        yield int(ray.cluster_resources().get("GPU", 0))


def slot_of(count: int, by_actors: bool) -> Slot:
    """The slot of an engine with so many GPUs of this machine."""
    if not by_actors:
        return reserve(Placement("cuda", (Pool((Role("engine", 1, count),)),)), timeout_s=60)["engine"][0]
    ranks = reserve(Placement("cuda", (Pool((Role("rank", count), Role("engine", 1, count))),)), timeout_s=60)
    workers = tuple(ranks["rank"])
    (whole,) = ranks["engine"]
    told = tuple(Slot(one.num_cpus, one.num_gpus, one.group, one.bundle, whole.gpus) for one in workers)
    return Slot(0.0, 0.0, whole.group, whole.bundle, whole.gpus, told)


@pytest.mark.parametrize(("count", "by_actors"), [(1, False), (1, True), (2, False), (2, True)])
def test_the_log_probs_are_those_of_the_model(gpus, tmp_path, count, by_actors):
    if gpus < count:
        pytest.skip(f"needs {count} GPUs")
    model = make_model("split", seed=1).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    config = VLLMConfig.of("ppo", gpu_memory_utilization=0.2, tensor_parallel_size=count, enforce_eager=True)
    spec = EngineSpec(str(tmp_path / "model"), "bfloat16", "cuda", MAX_LEN, 0, config)
    slot = slot_of(count, by_actors)
    pool: EnginePool = start(spec, [slot], tmp_path, timeout_s=300)
    asked = requests(8)
    assert gap(model.float(), asked, pool.generate_all(asked)) < BF16_GAP
    pool.close()
    ray.util.remove_placement_group(slot.group)
