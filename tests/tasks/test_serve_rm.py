"""task=serve_rm: a text that cannot be scored gets a reason, and the others of its request their scores."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.tools import ServeConfig
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.models.builtin import builtin_folder
from rlhf_suite.rl.judge import TextJudge
from rlhf_suite.serving.http_server import BadRequest
from rlhf_suite.serving.reward_service import RewardService


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A small reward model with random weights."""
    folder, base = tmp_path_factory.mktemp("reward_model"), builtin_folder("builtin:tiny", "actor.model_name_or_path")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen3ForSequenceClassification(AutoConfig.from_pretrained(base, num_labels=1))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return TextJudge(
        ModelPlan("reward", str(folder), "value"), DeepSpeedConfig.of("serve_rm", param_dtype="fp32"), "cpu", None, 8
    )


@asynccontextmanager
async def running(judge, **limits):
    service = RewardService(judge, ServeConfig.of("serve_rm", **limits))
    async with service.lifespan(None):
        yield service


def answer(judge, texts, **limits):
    async def work():
        async with running(judge, **limits) as service:
            return await service.answer({"query": texts})

    return asyncio.run(work())


def test_the_longest_text_is_what_the_model_was_made_for_or_what_the_flag_says(judge):
    positions = AutoConfig.from_pretrained(judge.model.path).max_position_embeddings
    assert judge.positions == positions
    assert RewardService(judge, ServeConfig.of("serve_rm")).max_len == min(4096, positions)
    assert RewardService(judge, ServeConfig.of("serve_rm", max_len=7)).max_len == 7


def test_rows_that_cannot_be_scored_get_reasons_and_the_others_the_scores_they_have_alone(judge):
    bad = {
        "": "is empty",
        "\ud800": "surrogate",
        "b" * 200: "200 tokens, serve.max_len=100",
        "b" * 9999: "9999 characters",
    }
    texts = ["good", *bad, "better"]
    found = answer(judge, texts, max_len=100)
    alone = [answer(judge, [text])["rewards"][0] for text in ("good", "better")]
    assert [found["rewards"][0], found["rewards"][-1]] == pytest.approx(alone, abs=1e-5)
    assert found["rewards"][1:-1] == [None] * len(bad)
    assert all(words in error for words, error in zip(bad.values(), found["errors"][1:-1], strict=True))


def test_a_text_of_megabytes_is_refused_without_tokenising_it(judge, monkeypatch):
    seen = []
    monkeypatch.setattr(judge, "encode", lambda text: seen.append(len(text)) or [1])
    found = answer(judge, ["x" * 15_000_000, "y"])
    assert "15000000 characters, too many for serve.max_len=4096 tokens" in found["errors"][0]
    assert seen == [1]


def test_no_text_that_fits_is_taken_for_too_long(judge):
    """The longest token, as often as serve.max_len allows."""
    longest = max(judge.tokenizer.get_vocab(), key=len)
    found = answer(judge, [longest * 20], max_len=20)
    assert found["errors"] == [None]


def test_an_entry_that_is_not_a_text_is_named(judge):
    with pytest.raises(BadRequest, match="entry 1 is not a text"):
        answer(judge, ["a", 1])


def test_a_score_that_is_not_finite_is_an_error_of_its_row(judge, monkeypatch):
    monkeypatch.setattr(judge, "scores", lambda sequences: [float("nan")] * len(sequences))
    assert answer(judge, ["a"]) == {"rewards": [None], "errors": ["the score is nan"]}


def test_nothing_is_computed_for_a_request_that_was_cancelled_while_it_waited(judge, monkeypatch):
    computed, go_on = [], asyncio.Event()

    def scores(sequences):
        computed.append(len(sequences))
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(300)
        return [0.0] * len(sequences)

    async def work():
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with running(judge, batch_size=1) as service:
            first = asyncio.create_task(service.answer({"query": ["a"]}))
            second = asyncio.create_task(service.answer({"query": ["b"] * 50}))
            while sum(map(len, service.batcher.waiting.get("", []))) < 50:
                await asyncio.sleep(0.01)
            second.cancel()
            third = asyncio.create_task(service.answer({"query": ["c"]}))
            go_on.set()
            await asyncio.gather(first, third)

    loop = None
    monkeypatch.setattr(judge, "scores", scores)
    asyncio.run(asyncio.wait_for(work(), 500))
    assert computed == [1, 1]
