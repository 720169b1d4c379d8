"""Engines return the experts to which they sent each token: those that the trainer's routers choose for equal weights,
through interruptions, syncs and turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from probed_engines import PROMPT, make_model, requests, save_tokenizer, start, sync

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.data.generation import GenerationRequest, SamplingSettings
from rlhf_suite.data.trajectory import Trajectory, to_batch
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.load import load_model
from rlhf_suite.models.routing import routers_of

pytestmark = [pytest.mark.stack, pytest.mark.proof]


@pytest.fixture(scope="module")
def served(cluster, tmp_path_factory):
    """An engine that returns routes, and the folder and the model whose weights it has."""
    folder = tmp_path_factory.mktemp("routes")
    model = make_model("experts", 0)
    model.save_pretrained(folder / "experts")
    save_tokenizer(folder / "experts")
    pool = start(
        folder, "engine", "experts", VLLMConfig.of("ppo", kv_cache_mb=8), load_weights=False, returns_routes=True
    )
    pool.ready()
    sync(pool, model, 1)
    yield pool, folder / "experts", model
    pool.close()


def trainer(folder):
    return load_model(str(folder), head="lm", ds=DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True))


def choices(model, ids) -> np.ndarray:
    """What the routers of a model choose for the tokens of a sequence, [T, M, K], in ascending order."""
    taken = []
    routers = [router for _, router in routers_of(model.model, model.family)]
    hooks = [router.register_forward_hook(lambda module, given, output: taken.append(output[2])) for router in routers]
    with torch.no_grad():
        token_log_probs(model, TokenBatch(torch.as_tensor(ids), torch.tensor([len(ids)]), torch.ones(len(ids))))
    for hook in hooks:
        hook.remove()
    return torch.stack(taken, 1).sort(-1).values.numpy()


def whole_ids(request, answer) -> np.ndarray:
    return np.array([*request.prompt_ids, *answer.ids.tolist()])


def test_routes_are_those_of_the_trainer(served):
    pool, folder, _ = served
    model, asked = trainer(folder), requests(12)
    for request, answer in zip(asked, pool.generate_all(asked), strict=True):
        ids = whole_ids(request, answer)
        assert answer.routes.dtype == np.int8 and answer.routes.shape == (len(ids) - 1, 2, 2)
        np.testing.assert_array_equal(np.sort(answer.routes, -1), choices(model, ids)[:-1])


def test_an_interrupted_response_has_the_routes_of_all_its_parts(served):
    pool, folder, _ = served
    asked = requests(4, tokens=60)
    pending = [pool.submit(request) for request in asked]
    pool.pause()
    pool.resume()
    model = trainer(folder)
    for request, waiting in zip(asked, pending, strict=True):
        answer = waiting.result(timeout=120)
        ids = whole_ids(request, answer)
        np.testing.assert_array_equal(np.sort(answer.routes, -1), choices(model, ids)[:-1])


def test_later_turns_complete_the_routes_of_a_ledger(served):
    pool, folder, _ = served
    prompt = type("Prompt", (), {"ids": PROMPT, "images": None})()
    ledger = Trajectory.start(prompt, 0, 0)
    for turn in range(3):
        request = GenerationRequest(turn, ledger.ids.tolist(), 8, turn, SamplingSettings())
        (answer,) = pool.generate_all([request])
        ledger.append_model(answer.ids, answer.log_probs, answer.versions, answer.routes)
        if turn < 2:
            ledger.append_environment([5, 6, 7])
    assert (ledger.routes[:-1] >= 0).all() and (ledger.routes[-1] == -1).all()
    np.testing.assert_array_equal(np.sort(ledger.routes[:-1], -1), choices(trainer(folder), ledger.ids)[:-1])


def test_routes_bring_the_log_probs_of_other_routers_back(served, tmp_path):
    """The engine has routers with an error of a few percent, as of rounding, and only their choice is taken over."""
    pool, _, model = served
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in model.state_dict().items():
        if ".gate.weight" in name:  # other choices, by logits that are nearly the same
            noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
            exact[name] = value * (1 + 3e-2 * noise)
    other = make_model("experts", 0)
    other.load_state_dict(exact)
    other.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    perturbed, asked = trainer(tmp_path), requests(24, tokens=60)
    ledgers = []
    for request, answer in zip(asked, pool.generate_all(asked), strict=True):
        prompt = type("Prompt", (), {"ids": request.prompt_ids, "images": None})()
        ledger = Trajectory.start(prompt, 0, request.id)
        ledger.append_model(answer.ids, answer.log_probs, answer.versions, answer.routes)
        ledgers.append(ledger)
    batch = to_batch(ledgers)
    with torch.no_grad():
        replayed = token_log_probs(perturbed, batch)
        plain = token_log_probs(perturbed, TokenBatch(batch.ids, batch.lengths, batch.mask))
    gaps = {
        name: (output.log_probs - batch.engine_log_probs)[batch.mask.bool()].abs()
        for name, output in (("own routes", plain), ("routing replay", replayed))
    }
    print({name: f"mean {gap.mean():.1e}, max {gap.max():.1e}" for name, gap in gaps.items()})
    print(f"rerouted {replayed.rerouted.mean():.2e}")
    assert replayed.rerouted.any()
    assert gaps["routing replay"].mean() < gaps["own routes"].mean() / 2


@pytest.mark.notices(
    "a token that the engine reads again after a sync keeps the route of the weights before",
    "engines/routes.py",
    "parts[:] = [torch.cat(parts)[:before]]",
    "begin, count = begin + known - before, count - known + before",
)
def test_a_response_that_a_sync_interrupts_has_the_routes_of_the_newest_weights(served, tmp_path):
    """What it says after the sync follows from all tokens before it, as the new weights have read them."""
    pool, _, model = served
    new = make_model("experts", 5)
    new.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    asked = requests(4, tokens=80)
    pending = [pool.submit(request) for request in asked]
    pool.submit(replace(asked[0], max_new_tokens=8, seed=99)).result(60)
    sync(pool, new, 2)
    answers = [waiting.result(timeout=120) for waiting in pending]
    mixed = [pair for pair in zip(asked, answers, strict=True) if {*pair[1].versions} == {1, 2}]
    assert mixed
    for request, answer in mixed:
        expected = choices(trainer(tmp_path), whole_ids(request, answer))[:-1]
        np.testing.assert_array_equal(np.sort(answer.routes, -1), expected)
    sync(pool, model, 3)
