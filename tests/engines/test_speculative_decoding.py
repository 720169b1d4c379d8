"""With speculative decoding samples have the distribution and the log-probs of the model."""

from __future__ import annotations

import numpy as np
import pytest
import ray
import torch
from probed_engines import PROMPT, VOCAB, make_model, start, sync

from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.data.generation import GenerationRequest, SamplingSettings

pytestmark = pytest.mark.proof
SAMPLES = 4000
CRITICAL = 1.5  # of chi-square per degree of freedom; with 50 degrees it is above that in less than 2 % of all draws


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def pool(request, cluster, tmp_path_factory):
    """An engine that guesses by what stands in the prompt, or by another model with random weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("tied", 1), ("draft", 2)):
        make_model("tied", seed=seed).save_pretrained(folder / name)
    settings = {"method": request.param, "num_speculative_tokens": 3}
    own = {"model": str(folder / "draft")} if request.param == "draft_model" else {"prompt_lookup_min": 1}
    config = VLLMConfig.of("ppo", kv_cache_mb=32, speculative_config=settings | own)
    pool = start(folder, request.param, "tied", config, load_weights=False)
    yield pool
    ray.kill(pool._handles[0])


def sample(pool, count: int, tokens: int, temperature: float = 1.0):
    settings = SamplingSettings(temperature=temperature)
    asked = [GenerationRequest(i, PROMPT, tokens, seed=1000 + i, sampling=settings) for i in range(count)]
    return pool.generate_all(asked)


@pytest.mark.notices(
    "the guesses of the CPU are judged by uninitialised numbers",
    "engines/build.py",
    "            prepare_speculation(spec.vllm)",
    "            pass",
)
def test_log_probs_are_those_of_the_model_whose_weights_were_synced(pool):
    model = make_model("tied", seed=1)
    sync(pool, model, version=1)
    for temperature in (1.0, 0.7):
        for answer in sample(pool, 40, 24, temperature):
            ids = torch.tensor([[*PROMPT, *answer.ids.tolist()]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(PROMPT) - 1 : -1] / temperature
            own = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
            assert np.abs(own - answer.log_probs).max() < 2e-5
    report = sync(pool, model, version=2)
    assert 0 < report.accepted < report.guessed


def test_the_second_token_has_its_exact_distribution(pool):
    """p(b) = sum over a of p(a) p(b | a), which no other token's guess may change."""
    model = make_model("tied", seed=1)
    sync(pool, model, version=3)
    with torch.no_grad():
        first = model(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1)
        follows = torch.tensor([[*PROMPT, token] for token in range(VOCAB)])
        second = first @ model(follows).logits[:, -1].double().softmax(-1)
    answers = [answer.ids for answer in sample(pool, SAMPLES, 5)]
    for place, expected in ((0, first), (1, second)):
        ids = torch.tensor([int(ids[place]) for ids in answers if len(ids) > place])
        counts, mean = torch.bincount(ids, minlength=VOCAB).double(), expected * len(ids)
        chosen = mean > 5
        freedom = int(chosen.sum()) - 1
        assert freedom > 40
        assert float(((counts - mean).square() / mean)[chosen].sum()) / freedom < CRITICAL
