"""The weight version of every token is true: transformers with the weights of that version gives the engine's log-prob.

A checkpoint of each step keeps its weights. Version v of the weights is what v steps have trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import jobs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

STEPS = jobs.ASYNC_STEPS
LIMIT = 1e-6


@dataclass(frozen=True)
class Tokens:
    """What the model wrote in one response: the engine's log-probs, the stamps, and log-probs under each version."""

    engine: np.ndarray  # [T]
    version: np.ndarray  # [T]
    recomputed: np.ndarray  # [STEPS, T]

    def differences(self, shift: int = 0) -> np.ndarray:
        """Return the absolute difference for each token, [T], if its version were `shift` versions later."""
        rows = np.clip(self.version + shift, 0, STEPS - 1)
        return np.abs(self.recomputed[rows, np.arange(len(rows))] - self.engine)


@pytest.fixture(scope="module", params=[pytest.param("ahead", marks=pytest.mark.proof), "stream"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def responses(mode, runs, request):
    """The tokens of every response that a run has trained on."""
    folder = request.getfixturevalue(f"asynchronous_{mode}")
    start = runs / "random"
    saved = [start, *(folder / f"checkpoints/step_{step:06d}/hf" for step in range(1, STEPS))]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in saved]
    return [recomputed(sample, models) for step in range(1, STEPS + 1) for sample in jobs.rollout(folder, step)]


@torch.no_grad()
def recomputed(sample, models) -> Tokens:
    ids = torch.tensor(sample["ids"])
    found = [model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0] for model in models]
    model_wrote = np.array(sample["weight_version"]) >= 0
    return Tokens(
        np.array(sample["engine_log_probs"])[model_wrote],
        np.array(sample["weight_version"])[model_wrote],
        np.array([row.numpy() for row in found])[:, model_wrote[1:]],
    )


def mean(parts) -> float:
    return float(np.concatenate(parts).mean())


@pytest.mark.notices(
    "tokens are stamped with the version before that of their weights",
    "engines/actor.py",
    "engine.set_weight_version(str(manifest.version))",
    "engine.set_weight_version(str(max(manifest.version - 1, 0)))",
    limit_s=600,
)
@pytest.mark.notices(
    "unfinished responses keep the KV cache of the old weights",
    "engines/actor.py",
    "engine.reset_prefix_cache(reset_running_requests=True)",
    "engine.reset_prefix_cache()",
    limit_s=600,
)
def test_every_token_has_the_log_prob_of_the_weights_that_it_is_stamped_with(responses, record_property):
    versions = np.concatenate([tokens.version for tokens in responses])
    differences = np.concatenate([tokens.differences() for tokens in responses])
    record_property("mean difference of log-probs", float(differences.mean()))
    assert len({*versions}) >= STEPS - jobs.ASYNC_BOUND
    for version in {*versions}:
        assert differences[versions == version].mean() <= LIMIT, version


def test_tokens_after_a_change_of_weights_follow_the_new_weights_alone(mode, responses):
    several = [tokens for tokens in responses if len({*tokens.version}) > 1]
    if mode == "ahead":
        assert not several
    else:
        assert (
            several and mean([tokens.differences()[tokens.version > tokens.version[0]] for tokens in several]) <= LIMIT
        )


def test_the_versions_are_far_enough_apart_to_tell_them_by_their_log_probs(responses, record_property):
    found = mean([tokens.differences(1) for tokens in responses])
    record_property("under the next version", float(found))
    assert found > 1000 * LIMIT
