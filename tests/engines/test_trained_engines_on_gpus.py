"""An engine beside the process that trains its weights: syncs with requests under way, and sleep while others take the
memory of the GPU. Each test is the same on a CPU, without the memory that only a GPU gives back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

ray = pytest.importorskip("ray")
pytest.importorskip("vllm")

from probed_engines import MAX_LEN, checkpoint, gap, log_probs_of, make_model, requests  # noqa: E402

from local_ray import local_ray  # noqa: E402
from rlhf_suite.config.declarations.rollout import VLLMConfig  # noqa: E402
from rlhf_suite.config.plan.placement import Placement, Pool, Role  # noqa: E402
from rlhf_suite.engines.pool import EnginePool  # noqa: E402
from rlhf_suite.engines.spec import EngineSpec  # noqa: E402
from rlhf_suite.engines.start import start  # noqa: E402
from rlhf_suite.errors import RunError  # noqa: E402
from rlhf_suite.launch.actor_log import Member  # noqa: E402
from rlhf_suite.launch.placement import reserve  # noqa: E402
from rlhf_suite.weight_sync.sender import IpcSender, StreamSender  # noqa: E402

ON = [pytest.param("cpu", marks=pytest.mark.proof), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
BACKENDS = {"cpu": "gloo", "cuda": "ipc"}
LIMITS = {"cpu": 1e-6, "cuda": 0.05}  # of a log-prob, on average: fp32, and the rounding of bf16
WAIT_S = 300


@pytest.fixture(scope="module")
def cluster(request):
    ray.cloudpickle.register_pickle_by_value(request.module)
    with local_ray(num_cpus=4):
        yield


class Trainer:
    """A process that has the weights of the policy on its device, and may take more of its memory."""

    def __init__(self, device: str, backend: str) -> None:
        self.device, self.held = device, torch.empty(0)
        kind = DTYPES[device], True, "127.0.0.1"
        self.sender = IpcSender(*kind, 0, WAIT_S) if backend == "ipc" else StreamSender(backend, *kind, WAIT_S)

    def port(self) -> int:
        return self.sender.port

    def connect(self, world_size: int, meeting: int) -> str:
        return self.sender.connect(world_size, meeting)

    def publish(self, version: int, seed: int):
        model = make_model("tied", seed)
        return self.sender.send(version, ((name, tensor.to(self.device)) for name, tensor in checkpoint(model)))

    def take(self, share: float) -> None:
        """Take a share of the memory of the GPU, and give back what was taken before."""
        self.held = torch.empty(0)
        if self.device == "cuda":
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            self.held = torch.ones(int(total * share), dtype=torch.uint8, device="cuda")


class Pair:
    """A trainer, and an engine that has the weights of seed 1 from it."""

    def __init__(self, folder, device: str, backend: str, own_gpus: bool = False, **spec) -> None:
        self.device, self.backend = device, backend
        make_model("tied", seed=0).to(DTYPES[device]).save_pretrained(folder / "model")
        roles = Role("actor", 1), Role("engine", 1, 1)
        pools = tuple(Pool((role,)) for role in roles) if own_gpus else (Pool(roles),)
        slots = reserve(Placement(device, pools), WAIT_S)
        self.groups = {slot.group for name in slots for slot in slots[name]}
        config = VLLMConfig.of("ppo", enable_prefix_caching=True)
        config.kv_cache_mb, config.gpu_memory_utilization = (32, None) if device == "cpu" else (None, 0.3)
        name = str(DTYPES[device]).removeprefix("torch.")
        made = EngineSpec(str(folder / "model"), name, device, MAX_LEN, 0, config, backend, load_weights=False, **spec)
        self.pool: EnginePool = start(made, slots["engine"], folder, WAIT_S)
        self.trainer = ray.remote(Trainer).options(**slots["actor"][0].options()).remote(device, backend)
        self.member = Member("actor-0", folder / "actor-0.log")
        port = ray.get(self.trainer.port.remote())
        assert self.pool.connect("127.0.0.1", port, self.trainer.connect.remote, self.member) == ""
        self.sync(1, seed=1)

    def sync(self, version: int, seed: int) -> None:
        self.pool.sync(self.backend, version, lambda: [self.trainer.publish.remote(version, seed)], [self.member])

    def model(self, seed: int):
        """Return the model that the engine computes, in fp32."""
        return make_model("tied", seed).to(DTYPES[self.device]).float()

    def agrees(self, seed: int) -> None:
        asked = requests(8)
        assert gap(self.model(seed), asked, self.pool.generate_all(asked)) < LIMITS[self.device]


@contextmanager
def pair(*arguments, **spec) -> Iterator[Pair]:
    made = Pair(*arguments, **spec)
    try:
        yield made
    finally:
        made.pool.close()
        ray.kill(made.trainer)
        for group in made.groups:
            ray.util.remove_placement_group(group)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("device", ON)
def test_tokens_behind_a_sync_with_requests_under_way_come_from_the_new_weights(tmp_path, device):
    """On a GPU with vLLM's defaults: graphs of CUDA, and steps that are scheduled ahead."""
    with pair(tmp_path, device, BACKENDS[device]) as made:
        made.agrees(1)
        asked = requests(64, tokens=80)
        waiting = [made.pool.submit(request) for request in asked]
        made.pool.submit(requests(1, tokens=2)[0]).result()  # the last one to start, and the first to end
        made.pool.pause()
        made.sync(9, seed=5)
        made.pool.resume()
        answers = [each.result() for each in waiting]
        assert {answer.versions.min() for answer in answers} == {1}
        before, after, errors = made.model(1), made.model(5), []
        for request, answer in zip(asked, answers, strict=True):
            ids, begin = [*request.prompt_ids, *answer.ids.tolist()], len(request.prompt_ids)
            switch = int((answer.versions == 1).sum())
            assert 0 < switch < 80
            assert answer.versions.tolist() == [1] * switch + [9] * (80 - switch)
            expected = [log_probs_of(before, ids)[begin:][:switch], log_probs_of(after, ids)[begin:][switch:]]
            errors.append(np.abs(np.concatenate(expected) - answer.log_probs).mean())
        assert np.mean(errors) < LIMITS[device]
        once, twice = (made.pool.generate_all(requests(32)) for _ in range(2))
        assert [one.ids.tolist() for one in once] == [other.ids.tolist() for other in twice]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("discards", [False, True], ids=["weights to the host", "weights discarded"])
@pytest.mark.parametrize("device", ON)
def test_the_memory_of_an_engine_that_sleeps_can_be_taken_by_the_trainer(tmp_path, device, discards):
    """Of an engine that has 30 percent of the GPU when it is awake, beside a trainer that takes 85 percent."""
    with pair(tmp_path, device, BACKENDS[device], enable_sleep=True, discards_weights=discards) as made:
        for version in (2, 3):
            made.pool.sleep()
            ray.get(made.trainer.take.remote(0.85))
            ray.get(made.trainer.take.remote(0.0))
            made.pool.wake("weights")
            made.sync(version, seed=version)
            made.pool.wake("kv_cache")
            made.agrees(version)


@pytest.mark.gpu
@pytest.mark.usefixtures("cluster")
def test_an_engine_that_gets_no_memory_back_says_so(tmp_path):
    with pair(tmp_path, "cuda", "ipc", enable_sleep=True) as made:
        made.pool.sleep()
        ray.get(made.trainer.take.remote(0.9))
        with pytest.raises(RunError, match=r"(?i)memory"):
            made.pool.wake()


@pytest.mark.gpu
@pytest.mark.usefixtures("cluster")
def test_weights_go_from_one_gpu_to_another_by_nccl(tmp_path):
    if ray.cluster_resources().get("GPU", 0) < 2:
        pytest.skip("needs 2 GPUs")
    with pair(tmp_path, "cuda", "nccl", own_gpus=True) as made:
        for version in (2, 3):
            made.sync(version, seed=version)
            made.agrees(version)
