"""Real engines that hold a base model and get the adapters of a trainer alone."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from probed_engines import CONFIGS, MAX_LEN, gap, log_probs_of, requests
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from rlhf_suite.config.declarations.ds import LoRAConfig
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.spec import AdapterSpec, EngineSpec
from rlhf_suite.engines.start import engine_env
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.models.adapters import iterate_adapters
from rlhf_suite.models.forward import LanguageModel
from rlhf_suite.models.lora import add_lora
from rlhf_suite.models.quantize import four_bit, keep_exact
from rlhf_suite.models.weights import iterate_weights
from rlhf_suite.weight_sync.digests import ADAPTER, BASE, WHOLE, Manifest, WeightSyncError
from rlhf_suite.weight_sync.receiver import ShmReceiver, UpdateInfo
from rlhf_suite.weight_sync.sender import ShmSender, StreamSender

# vLLM's class of this model takes no adapters.
GPT2 = GPT2Config(vocab_size=64, n_positions=MAX_LEN, n_embd=64, n_layer=2, n_head=2, eos_token_id=1)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


KINDS = CONFIGS | {"gpt2": GPT2}


class ProbedEngine(Engine):
    """An engine whose adapter a test can damage and count."""

    async def damage(self, name: str, kind: str) -> None:
        def change(worker):
            layer = worker.get_model().lora_manager.modules[name]
            getattr(layer, f"{kind}_stacked")[0].flatten()[3] += 1e-3

        await self._call(lambda engine: engine.collective_rpc(change))

    async def workers(self) -> list[int]:
        return await self._call(lambda engine: engine.collective_rpc(lambda worker: os.getpid()))

    async def adapters(self) -> list[list[int]]:
        return await self._call(lambda engine: engine.collective_rpc(lambda worker: [*worker.list_loras()]))


@ray.remote(num_cpus=0.1)
class Trainer:
    """A trainer process with a stream, which keeps what it has sent last."""

    def __init__(self) -> None:
        self.sender = StreamSender("gloo", torch.float32, True, "127.0.0.1", 60, keep=True)

    def port(self) -> int:
        return self.sender.port

    def connect(self, world_size: int, meeting: int) -> None:
        self.sender.connect(world_size, meeting)

    def publish(self, version: int, part: str, seed: int):
        return self.sender.send(version, tensors(adapted("tied", seed), part), part)

    def publish_again(self, version: int, part: str, seed: int):
        return self.sender.send_again(version, part) or self.publish(version, part, seed)


def adapted(kind: str, seed: int, targets=("all-linear",), rank: int = 4) -> LanguageModel:
    """A model with adapters that are not zero."""
    torch.manual_seed(1)  # the base is the same for all seeds
    model = LanguageModel(AutoModelForCausalLM.from_config(KINDS[kind], dtype=torch.float32).eval(), False)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.08 + (parameter.dim() == 1)
    add_lora(model, LoRAConfig(rank=rank, alpha=3 * rank, target_modules=list(targets)), seed)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    return model


def tensors(model: LanguageModel, part: str):
    return iterate_adapters(model.model) if part == ADAPTER else iterate_weights(model, merges=part == WHOLE)


def sync(pool: EnginePool, model: LanguageModel, version: int, part: str = ADAPTER):
    sender = ShmSender(torch.float32, check=True)
    try:
        return pool.update_weights(sender.send(version, tensors(model, part), part))[0]
    finally:
        sender.release()


def engine(folder: Path, kind: str, config: VLLMConfig, backend: str = "shm", name: str = ""):
    """An engine that gets adapters, and how errors name it."""
    AutoModelForCausalLM.from_config(KINDS[kind], dtype=torch.float32).save_pretrained(folder / kind)
    tested = ray.remote(ProbedEngine).options(num_cpus=0.1, runtime_env={"env_vars": engine_env("cpu")})
    member = Member(name or kind, folder / f"{name or kind}.log")
    spec = EngineSpec(
        str(folder / kind), "float32", "cpu", MAX_LEN, 0, config, backend, False, adapter=AdapterSpec(4, MODULES)
    )
    return partial(tested.remote, spec, member.log), member


def start(folder: Path, kind: str, config: VLLMConfig, backend: str = "shm") -> EnginePool:
    create, member = engine(folder, kind, config, backend)
    return EnginePool([create()], [member], 300, lambda *_: create(), config.max_restarts)


@pytest.fixture(scope="module")
def pools(cluster, tmp_path_factory):
    """One pool of one engine each, started together."""
    folder = tmp_path_factory.mktemp("models")
    config = VLLMConfig.of("ppo", enable_prefix_caching=True, kv_cache_mb=32)
    pools = {
        "tied": start(folder, "tied", config),
        "gpt2": start(folder, "gpt2", config),
        "stream": start(folder, "tied", VLLMConfig.of("ppo", kv_cache_mb=32, max_restarts=1), "gloo"),
    }
    yield pools
    for pool in pools.values():
        ray.kill(pool._handles[0])


@pytest.fixture
def pool(pools):
    """The engine with the base model and the adapter of seed 1."""
    report = sync(pools["tied"], adapted("tied", 1), 1, BASE)
    assert report.received == report.read_back > 20, report.not_readable
    sync(pools["tied"], adapted("tied", 1), 1)
    return pools["tied"]


@pytest.mark.notices(
    "the adapter does not reach the requests",
    "engines/actor.py",
    'return LoRARequest("policy", NUMBER',
    'return None and LoRARequest("policy", NUMBER',
)
@pytest.mark.notices(
    "adapters are sent without their scale",
    "models/adapters.py",
    "up.detach().float() * layer.scaling[ADAPTER]",
    "up.detach().float()",
)
@pytest.mark.notices(
    "a layer gets the adapter of another layer",
    "weight_sync/adapter.py",
    "parts = [named.get(part) for part",
    'parts = [named.get(part.replace(".0.", ".1.")) for part',
)
@pytest.mark.notices(
    "the prefix cache outlives the adapter that wrote it",
    "engines/actor.py",
    "engine.reset_prefix_cache(reset_running_requests=True)",
    "pass",
)
def test_an_engine_with_base_and_adapter_has_the_log_probs_of_the_trainer(pool):
    """Prompts of more than a block of the prefix cache are asked for again with each adapter; there is never more than
    one of them."""
    asked = requests(6)
    for version in (2, 3, 4):
        model = adapted("tied", version)
        report = sync(pool, model, version)
        assert report.received == report.read_back == 2 * 7 * 2, report.not_readable
        answers = pool.generate_all(asked)
        assert gap(model.model, asked, answers) < 1e-6
        (scores,) = pool.score([[*asked[0].prompt_ids]])
        assert np.abs(scores[0] - log_probs_of(model.model, asked[0].prompt_ids)).max() < 1e-5
        assert {*answers[0].versions} == {version}
        assert ray.get(pool.handles[0].adapters.remote()) == [[1]]


def test_adapters_of_some_modules_are_those_of_no_other(pool):
    """The adapter before was of all modules."""
    model, asked = adapted("tied", 5, ("q_proj", "down_proj")), requests(4)
    report = sync(pool, model, 2)
    assert report.received == report.read_back == 2 * 2 * 2
    assert gap(model.model, asked, pool.generate_all(asked)) < 1e-6


def test_requests_under_way_go_on_with_the_new_adapter(pool):
    old, new = adapted("tied", 1).model, adapted("tied", 6)
    asked = [replace(request, max_new_tokens=70) for request in requests(4)]
    futures = [pool.submit(request) for request in asked]
    pool.submit(replace(asked[0], max_new_tokens=8, seed=99)).result(60)
    assert not any(future.done() for future in futures)
    sync(pool, new, 2)
    answers = [future.result(120) for future in futures]
    switched = [answer for answer in answers if {*answer.versions} == {1, 2}]
    assert switched
    for request, answer in zip(asked, answers, strict=True):
        ids, start = [*request.prompt_ids, *answer.ids.tolist()], len(request.prompt_ids)
        for version, model in ((1, old), (2, new.model)):
            chosen = answer.versions == version
            difference = np.abs(log_probs_of(model, ids)[start:] - answer.log_probs)[chosen]
            assert difference.size == 0 or difference.max() < 1e-5


@pytest.mark.notices(
    "what an engine holds of an adapter is not compared",
    "weight_sync/receiver.py",
    "return replace(compare_loads(slots, loads), needs_all=True)",
    "return replace(compare_loads(slots, None), needs_all=True)",
)
@pytest.mark.parametrize(
    ("layer", "kind", "tensor"),
    [("self_attn.qkv_proj", "lora_a", "self_attn.q_proj.lora_A"), ("mlp.down_proj", "lora_b", "mlp.down_proj.lora_B")],
)
def test_an_adapter_that_changed_in_the_engine_is_named(pool, layer, kind, tensor):
    (handle,) = pool.handles
    ray.get(handle.damage.remote(f"model.layers.1.{layer}", kind))
    with pytest.raises(WeightSyncError, match=rf"tensor model.layers.1.{tensor} .* differs in .*{layer}.lora_.*"):
        ray.get(handle.attest.remote())


@pytest.mark.notices(
    "bytes of an adapter that changed on the way are not noticed",
    "weight_sync/receiver.py",
    "self.receive(update_info, collect)",
    "self.receive(update_info, collect) if 0 else [collect(*batch) for batch in self.batches(update_info)]",
)
@pytest.mark.parametrize("tensor", ["layers.0.self_attn.q_proj.lora_A", "layers.1.mlp.down_proj.lora_B"])
def test_a_byte_of_an_adapter_that_changed_on_the_way_is_noticed(tmp_path, tensor):
    """The receiver compares every tensor with its digest before it installs any, so no engine is needed here."""
    sender, model = ShmSender(torch.float32, check=True), adapted("tied", 3)
    manifest = sender.send(2, tensors(model, ADAPTER), ADAPTER)
    (entry,) = [entry for entry in manifest.entries if entry.name.endswith(tensor)]
    data = np.memmap(manifest.path, dtype=np.uint8, mode="r+")
    data[entry.offset + 5] ^= 4
    data.flush()
    receiver = object.__new__(ShmReceiver)
    receiver.model = nn.Module()  # without layers of vLLM: nothing can be installed
    with pytest.raises(WeightSyncError, match=rf"weights 2: tensor \S*{tensor} .* arrived changed"):
        receiver.receive_adapter(UpdateInfo(**manifest.as_update_info()))
    assert receiver.adapter is None
    sender.release()


def test_the_base_of_a_4_bit_model_is_what_its_matrices_stand_for(pools, tmp_path):
    """The engine gets the dequantised matrices and the adapters, so nothing is rounded on the way."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(KINDS["tied"], dtype=torch.float32).save_pretrained(tmp_path)
    settings = four_bit(torch.float32)
    four = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, dtype=torch.float32).eval()
    model = LanguageModel(four, False)
    keep_exact(model)
    add_lora(model, LoRAConfig(rank=4, alpha=12), 3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    pool, asked = pools["tied"], requests(4)
    for part in (BASE, ADAPTER):
        report = sync(pool, model, 7, part)
        assert report.received == report.read_back, report.not_readable
    assert gap(model.model, asked, pool.generate_all(asked)) < 1e-6


def test_a_model_that_takes_no_adapters_gets_whole_weights(pools):
    pool, model, asked = pools["gpt2"], adapted("gpt2", 2), requests(4)
    assert not pool.takes_adapters and pools["tied"].takes_adapters
    sync(pool, model, 1, WHOLE)
    assert gap(model.model, asked, pool.generate_all(asked)) < 1e-6


@pytest.mark.notices(
    "an engine that is started again has no adapter", "engines/pool.py", "self._published[:1] if", "self._published if"
)
def test_an_engine_that_is_started_again_gets_base_and_adapter_by_stream(pools, tmp_path):
    pool, trainer, asked = pools["stream"], Trainer.remote(), requests(4)
    members = [Member("trainer", tmp_path / "trainer.log")]

    def meet() -> None:
        pool.connect("127.0.0.1", ray.get(trainer.port.remote()), trainer.connect.remote, members[0])

    def send_again(published: list[Manifest]) -> None:
        meet()
        assert [each.part for each in published] == [BASE, ADAPTER]
        for each in published:
            again = partial(trainer.publish_again.remote, each.version, each.part, 9)
            pool.stream(each.version, lambda: [again()], members, each.part)  # noqa: B023

    meet()
    pool.send_again = send_again
    for version, part in ((1, BASE), (1, ADAPTER), (2, ADAPTER)):
        publish = partial(trainer.publish.remote, version, part, version)
        manifest, _ = pool.sync("gloo", version, lambda: [publish()], members, part)  # noqa: B023
        assert (manifest.part, len(manifest.entries)) == (part, 28 if part == ADAPTER else len(manifest.entries))
    assert gap(adapted("tied", 2).model, asked, pool.generate_all(asked)) < 1e-6
    os.kill(ray.get(pool.handles[0].workers.remote())[0], signal.SIGKILL)
    answers = pool.generate_all(asked)
    assert pool.restarts == 1 and {*answers[0].versions} == {2}
    assert gap(adapted("tied", 2).model, asked, answers) < 1e-6


@pytest.mark.proof
def test_workers_of_a_split_engine_have_their_parts_of_an_adapter(cluster, tmp_path):
    pool, asked = start(tmp_path, "split", VLLMConfig.of("ppo", kv_cache_mb=32, tensor_parallel_size=2)), requests(4)
    sync(pool, adapted("split", 1), 1, BASE)
    for version in (1, 2):
        model = adapted("split", version)
        report = sync(pool, model, version)
        assert report.received == report.read_back == 28, report.not_readable
        assert gap(model.model, asked, pool.generate_all(asked)) < 1e-6
    ray.kill(pool.handles[0])


def test_an_adapter_without_a_place_is_refused(pool):
    """It ends the engine."""
    with pytest.raises(WeightSyncError, match=r"tensor .*lora_A has no place .*vllm.sync_adapters=false"):
        sync(pool, other_names(adapted("tied", 1)), 2)


def other_names(model: LanguageModel) -> LanguageModel:
    """A model whose layers have names that vLLM's does not know."""
    model.model.model.add_module("blocks", model.model.model.layers)
    del model.model.model.layers
    return model
