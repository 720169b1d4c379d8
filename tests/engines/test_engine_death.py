"""Real engines whose process is killed while they generate: their unfinished requests are made again, the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from actor_processes import kill_actor
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings
from rlhf_suite.engines.actor import Engine
from rlhf_suite.engines.build import engine_args
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.engines.start import engine_env, start
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.placement import Slot
from rlhf_suite.launch.wait import ActorDied
from rlhf_suite.weight_sync.sender import ShmSender, StreamSender

MAX_LEN, TOKENS = 128, 80
CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=MAX_LEN,
    eos_token_id=1,
)


@ray.remote(num_cpus=0.1)
class Trainer:
    """A trainer process with a stream. It has the weights only once: to send them again it must have kept them."""

    def __init__(self) -> None:
        self.sender = StreamSender("gloo", torch.float32, True, "127.0.0.1", 60, keep=True)

    def port(self) -> int:
        return self.sender.port

    def connect(self, world_size: int, meeting: int) -> None:
        self.sender.connect(world_size, meeting)

    def publish(self, weights: dict[str, torch.Tensor]):
        return self.sender.send(1, weights.items())

    def publish_again(self):
        return self.sender.send_again(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("models") / "model"
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).save_pretrained(folder)
    return folder


def engines(count: int, backend: str, model: Path, logs: Path) -> EnginePool:
    config = VLLMConfig.of("ppo", kv_cache_mb=32, max_restarts=1)
    spec = EngineSpec(str(model), "float32", "cpu", MAX_LEN, 0, config, backend, load_weights=False)
    return start(spec, [Slot(0.1)] * count, logs, 120)


def weights() -> dict[str, torch.Tensor]:
    """Weights that no folder has, so that an engine has them from a sync alone."""
    torch.manual_seed(7)
    state = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).state_dict()
    return {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in state.items()}


def requests() -> list[GenerationRequest]:
    """Requests to prompts of their own, so that every engine gets some; the last one is short."""
    sizes = [TOKENS] * 64 + [2]
    return [GenerationRequest(i, [3 + i % 50, 5, 7], size, i, SamplingSettings()) for i, size in enumerate(sizes)]


def answers_with_a_death(pool: EnginePool, number: int) -> list[Generation]:
    """Kill an engine when the short request that was sent last is answered: all others are under way."""
    *long, short = [pool.submit(request) for request in requests()]
    short.result()
    assert not any(future.done() for future in long)
    kill_actor(pool.members[number])
    return [*(future.result() for future in long), short.result()]


def assert_equal(mine: list[Generation], theirs: list[Generation]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one.id == other.id
        for name in ("ids", "log_probs", "versions"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), (one.id, name)


@pytest.mark.notices(
    "an engine that is started again has random weights",
    "engines/pool.py",
    "                self._restore(started)\n",
    "",
)
@pytest.mark.notices(
    "an engine that is started again stamps its tokens with version 0",
    "engines/pool.py",
    '"update_weights", manifest)\n\n    def _dead',
    '"update_weights", Manifest(0, manifest.entries, manifest.path))\n\n    def _dead',
)
@pytest.mark.notices(
    "an engine is started again once more than it may be",
    "launch/link.py",
    "if count == self.limit:",
    "if count > self.limit:",
)
@pytest.mark.notices(
    "requests that a dead engine had get other seeds",
    "launch/link.py",
    "self.start(self.submit([*self.orders.items()]))",
    'replace = __import__("dataclasses").replace\n'
    "            self.start(self.submit([(n, replace(r, seed=r.seed + 1)) for n, r in "
    "self.orders.items()]))",
)
def test_unfinished_requests_of_the_only_engine_are_made_again_and_its_second_death_is_final(
    cluster, model, tmp_path, capfd
):
    pool, sender = engines(1, "shm", model, tmp_path), ShmSender(torch.float32, check=True, keep=True)
    trainer = [Member("trainer", tmp_path / "trainer.log")]
    manifest, _ = pool.sync("shm", 1, lambda: [ray.put(sender.send(1, weights().items()))], trainer)
    sender.release()
    assert manifest.path is not None and manifest.path.startswith("/proc/"), "a file that a killed sender would leave"
    expected = pool.generate_all(requests())
    assert_equal(answers_with_a_death(pool, 0), expected)
    assert pool.restarts == 1 and {*expected[0].versions} == {1}
    said = capfd.readouterr()
    assert "engine-0 died during" in said.err and "(restart 1 of 1, vllm.max_restarts)" in said.err
    assert "engine-0 runs again: its 64 unfinished requests are sent again" in said.out
    with pytest.raises(ActorDied, match=r"(?s)engine-0 died during 64 generations.*started again 1 times"):
        answers_with_a_death(pool, 0)
    sender.close()


@pytest.mark.notices(
    "an engine that is started again measures how much memory is left for its cache",
    "engines/pool.py",
    "self._create(number, self._kv_blocks.get(number))",
    "self._create(number, None)",
)
def test_an_engine_that_is_started_again_has_as_large_a_cache_as_before(cluster, model, tmp_path):
    """The second engine would by itself take half of what the first one had: on a GPU it measures what models leave."""
    member, sizes = Member("engine-0", tmp_path / "engine-0.log"), iter((32, 16))

    def create(_: int, kv_blocks: int | None = None):
        config = VLLMConfig.of("ppo", kv_cache_mb=next(sizes), max_restarts=1)
        spec = EngineSpec(str(model), "float32", "cpu", MAX_LEN, 0, config, kv_blocks=kv_blocks)
        environment = {"env_vars": engine_env("cpu")}
        return ray.remote(Engine).options(num_cpus=0.1, runtime_env=environment).remote(spec, member.log)

    pool = EnginePool([create(0)], [member], 120, create, max_restarts=1)
    (before,) = pool.ready()
    kill_actor(member)
    (_,) = pool._all("a ping", "ping")
    (after,) = pool.ready()
    assert pool.restarts == 1
    kv_bytes = 2 * CONFIG.num_hidden_layers * CONFIG.num_key_value_heads * CONFIG.head_dim * 4  # of a token
    assert before.kv_tokens == after.kv_tokens == (32 << 20) // kv_bytes
    pool.close()


@pytest.mark.notices(
    "an engine that is started again asks for its whole share of a GPU that models are on by now",
    "engines/build.py",
    '{"gpu_memory_utilization": NO_SHARE}',
    "{}",
)
@pytest.mark.parametrize("kv_cache_mb", [None, 32])
def test_an_engine_that_is_started_again_on_a_gpu_has_vllm_measure_nothing(model, kv_cache_mb):
    config = VLLMConfig.of("ppo", kv_cache_mb=kv_cache_mb, gpu_memory_utilization=0.5)
    first = EngineSpec(str(model), "bfloat16", "cuda", MAX_LEN, 0, config)
    arguments, again = engine_args(first, "shm"), engine_args(replace(first, kv_blocks=77), "shm")
    assert arguments["gpu_memory_utilization"] == 0.5 and "num_gpu_blocks_override" not in arguments
    assert again["gpu_memory_utilization"] == 0.01 and again["num_gpu_blocks_override"] == 77
    assert again["kv_cache_memory_bytes"] > 0
    changed = {"gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_memory_bytes"}
    assert {name for name in again if again[name] != arguments.get(name)} <= changed


@pytest.mark.proof
def test_one_of_two_engines_gets_the_weights_of_the_last_sync_again_by_stream(cluster, model, tmp_path):
    pool, trainer = engines(2, "gloo", model, tmp_path), Trainer.remote()
    members = [Member("trainer", tmp_path / "trainer.log")]

    def meet() -> None:
        pool.connect("127.0.0.1", ray.get(trainer.port.remote()), trainer.connect.remote, members[0])

    def send_again(published) -> None:
        meet()
        pool.stream(1, lambda: [trainer.publish_again.remote()], members)

    meet()
    pool.send_again = send_again
    pool.sync("gloo", 1, lambda: [trainer.publish.remote(weights())], members)
    expected = pool.generate_all(requests())
    found = answers_with_a_death(pool, 1)
    assert pool.restarts == 1
    for one, other in zip(found, expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert np.abs(one.log_probs - other.log_probs).max() < 1e-5
    pool.retire()
