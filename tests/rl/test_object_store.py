"""What Ray's object store holds at one time: the numbers of bytes are those of real responses, shards and answers."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from families import make_typed
from given import prompt
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.sections import section_of
from rlhf_suite.config.plan.object_store import (
    FORWARD,
    LEAST_MB,
    MARGIN,
    RESPONSE,
    UPDATE,
    UPDATE_OF_CRITIC,
    object_store_mb,
)
from rlhf_suite.config.plan.run_plan import Machine, models, resolve
from rlhf_suite.data.batch import column_units
from rlhf_suite.data.generation import Generation
from rlhf_suite.data.trajectory import Experience, Trajectory, to_batch
from rlhf_suite.models.families import bytes_of_routes
from rlhf_suite.preflight.inspections.machine import shared_memory
from rlhf_suite.preflight.inspections.routing import route_bytes
from rlhf_suite.rl.model_groups import CriticGroup, PolicyGroup
from rlhf_suite.rl.sharding import ForwardBatch, split

ROWS, TOKENS, HEADERS = 8, 5000, 40_000  # so that the bytes of headers and rows are less than one per token
POLICY = {"actor.model_name_or_path": "builtin:tiny"}


def experience() -> Experience:
    """Samples with every column that a token can have, but for routes, which few runs have."""
    made = []
    for row in range(ROWS):
        one = Trajectory.start(prompt(row), row, 0)
        one.append_model(np.arange(TOKENS), np.full(TOKENS, -0.5, np.float32), 1)
        made.append(one)
    batch = to_batch(made)
    empty = {
        name for name, unit in column_units(Experience).items() if unit == "token" and getattr(batch, name) is None
    }
    numbers = dict.fromkeys(empty - {"chosen", "routes"}, torch.ones(batch.num_tokens))
    return replace(batch, **numbers, chosen=torch.ones(batch.num_tokens, dtype=torch.bool))


@pytest.mark.parametrize(("group", "size"), [(PolicyGroup, UPDATE), (CriticGroup, UPDATE_OF_CRITIC)])
def test_an_update_sends_so_many_bytes_of_each_token(group, size):
    batch = replace(experience(), **dict.fromkeys(group.unread))
    sent = sum(len(pickle.dumps(shard, protocol=5)) for shard in split(batch, [range(4), range(4, 8)], 2))
    assert 0 <= sent - size * batch.num_tokens < HEADERS


def test_a_forward_pass_sends_and_answers_so_many_bytes_of_each_token():
    batch = experience()
    _, shards = ForwardBatch(batch).over(2)
    sent = sum(len(pickle.dumps(shard, protocol=5)) for shard in shards)
    answered = len(pickle.dumps(batch.mask.numpy(), protocol=5))
    assert 0 <= sent + answered - FORWARD * batch.num_tokens < HEADERS


def test_a_response_is_so_many_bytes_of_each_token():
    arrays = {"ids": np.int32, "log_probs": np.float32, "versions": np.int32}
    assert {*arrays} <= {field.name for field in fields(Generation)}
    assert sum(np.dtype(kind).itemsize for kind in arrays.values()) == RESPONSE


@pytest.mark.notices(
    "the object store has room for a fixed number of bytes",
    "config/plan/object_store.py",
    "math.ceil(MARGIN * bytes_at_once(run, models, routes, device) / 2**20)",
    "256",
)
def test_the_store_grows_with_the_tokens_of_a_step_and_the_models_that_read_them():
    sizes = {"rollout.batch_size": 1024, "rollout.n_samples_per_prompt": 8, "data.max_len": 4096}
    tokens = 1024 * 8 * 4096
    alone = section_of(
        Run, "ppo", POLICY | sizes | {"algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0.0}
    )
    assert object_store_mb(alone, models(alone), "cpu") == tokens * (RESPONSE + UPDATE) * MARGIN / 2**20
    critic = section_of(Run, "ppo", POLICY | sizes | {"algo.advantage.estimator": "gae", "algo.kl.init_coef": 0.1})
    needed = tokens * (RESPONSE + max(3 * FORWARD, UPDATE + UPDATE_OF_CRITIC)) * MARGIN / 2**20
    assert object_store_mb(critic, models(critic), "cpu") == needed
    assert resolve(critic, Machine("cpu", 0)).object_store_mb == needed
    critic.launch.object_store_mb = 99
    assert resolve(critic, Machine("cpu", 0)).object_store_mb == 99


@pytest.mark.notices(
    "the object store has no room for the routes of a batch",
    "config/plan/object_store.py",
    "max(forward, update) + routes)",
    "max(forward, update))",
)
def test_routes_are_sent_with_each_response_and_with_each_batch_of_the_policy():
    sizes = {"rollout.batch_size": 1024, "rollout.n_samples_per_prompt": 8, "data.max_len": 4096}
    tokens = 1024 * 8 * 4096
    run = section_of(Run, "ppo", POLICY | sizes | {"algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0.0})
    assert object_store_mb(run, models(run), "cpu", 384) == tokens * (RESPONSE + UPDATE + 2 * 384) * MARGIN / 2**20
    run.rollout.replay = "an earlier run"
    assert object_store_mb(run, models(run), "cpu", 384) == tokens * (UPDATE + 384) * MARGIN / 2**20


def test_the_routes_of_a_token_are_a_number_for_each_expert_that_it_visits_in_each_layer(tmp_path):
    make_typed(tmp_path, "qwen3_moe")
    run = section_of(Run, "ppo", {"actor.model_name_or_path": str(tmp_path), "actor.routing_replay": True})
    assert route_bytes(run) == 4 * 2
    assert resolve(run, Machine("cpu", 0), 384).object_store_mb > resolve(run, Machine("cpu", 0)).object_store_mb
    run.actor.routing_replay = False
    assert route_bytes(run) == 0
    qwen3_30b_a3b = {"num_experts": 128, "num_hidden_layers": 48, "num_experts_per_tok": 8}
    assert bytes_of_routes(qwen3_30b_a3b.get) == 384
    assert bytes_of_routes((qwen3_30b_a3b | {"num_experts": 256}).get) == 768
    assert bytes_of_routes({"num_hidden_layers": 48}.get) == 0


def test_small_runs_and_runs_without_rollouts_get_the_least_that_ray_takes():
    from ray._private.ray_constants import OBJECT_STORE_MINIMUM_MEMORY_BYTES

    assert LEAST_MB << 20 == OBJECT_STORE_MINIMUM_MEMORY_BYTES
    assert object_store_mb(section_of(Run, "ppo", POLICY), ["actor"], "cpu") >= LEAST_MB
    assert object_store_mb(section_of(Run, "ppo", POLICY | {"data.max_len": 64}), ["actor"], "cpu") == LEAST_MB
    assert object_store_mb(Run.of("sft"), ["actor"], "cpu") == LEAST_MB


def test_generation_needs_room_for_the_responses_under_way():
    run = section_of(Run, "generate", POLICY | {"vllm.num_engines": 8, "vllm.max_num_seqs": 512, "data.max_len": 8192})
    for device in ("cpu", "cuda"):
        assert object_store_mb(run, ["actor"], device) == 2 * 8 * 512 * 8192 * RESPONSE * MARGIN / 2**20


@pytest.mark.notices(
    "the preflight counts the responses of engines on GPUs as on the CPU",
    "preflight/inspections/machine.py",
    "model_sections(run), device_kind(run.launch)",
    'model_sections(run), "cpu"',
)
@pytest.mark.parametrize(("device", "sequences"), [("cpu", 256), ("cuda", 1024)])
def test_the_preflight_and_the_plan_count_the_sequences_of_the_kind_of_device(device, sequences):
    """No machine has so much shared memory, so the inspection says how much it looks for."""
    run = section_of(Run, "generate", POLICY | {"launch.device": device, "data.max_len": 10**9})
    needed = 2 * sequences * 10**9 * RESPONSE * MARGIN / 2**20
    (problem,) = shared_memory(run)
    assert problem.what.endswith(f"Ray's object store takes {math.ceil(needed)} MiB")
    assert resolve(run, Machine(device, 1)).object_store_mb == math.ceil(needed)
