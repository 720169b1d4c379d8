"""A trained reward model is a plain transformers folder: it loads, scores the same, and knows its own statistics."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.data.batch import Example, TokenBatch, collate
from rlhf_suite.data.builtin import rows
from rlhf_suite.models.forward import sequence_scores
from rlhf_suite.models.load import load_model
from small_runs import column, small_run

pytestmark = pytest.mark.stack

LINE = "task=rm train.max_steps=3 eval.max_samples=20 train.micro_batch_size=16 ds.value_head_prefix="


@pytest.fixture(scope="module", params=["score", "value_head"])
def trained(request, ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rm") / "run"
    metrics = ranks(1).call(small_run, folder, LINE + request.param)[0]
    return folder / "model", metrics, request.param


def held_out(tokenizer):
    """The evaluation pairs as they were encoded: prompt, answer, end token."""
    pairs = rows("builtin:reverse_pairs_eval", "")[:20]
    texts = [row["prompt"] + row[side] for row in pairs for side in ("chosen", "rejected")]
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]


@torch.no_grad()
def test_transformers_scores_as_the_suite_does(trained):
    folder, metrics, prefix = trained
    if prefix != "score":
        pytest.skip("transformers knows the head as `score`")
    ids = held_out(AutoTokenizer.from_pretrained(folder))
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    theirs = torch.stack([plain(input_ids=torch.tensor([row])).logits[0, 0] for row in ids])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ids], True, plain.config.pad_token_id)
    together = plain(input_ids=padded, attention_mask=(padded != plain.config.pad_token_id).long()).logits[:, 0]
    own = load_model(str(folder), head="value", ds=DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True))
    ours = sequence_scores(own, collate([Example(row, [0] * len(row)) for row in ids], TokenBatch))
    assert torch.allclose(ours, theirs, atol=1e-6) and torch.allclose(together, theirs, atol=1e-6)
    assert column(metrics, "eval/acc")[-1] == pytest.approx(float((theirs[::2] > theirs[1::2]).float().mean()))


@torch.no_grad()
def test_the_statistics_are_those_of_the_evaluation_set(trained):
    folder, metrics, prefix = trained
    ds = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True, value_head_prefix=prefix)
    model = load_model(str(folder), head="value", ds=ds)
    assert not model.head_is_new
    ids = held_out(AutoTokenizer.from_pretrained(folder))
    scores = sequence_scores(model, collate([Example(row, [0] * len(row)) for row in ids], TokenBatch))
    config = AutoConfig.from_pretrained(folder)
    assert config.reward_mean == pytest.approx(float(scores.mean()), abs=1e-6)
    assert config.reward_std == pytest.approx(float(scores.std(correction=0)), rel=1e-4)
    assert config.reward_mean == pytest.approx(column(metrics, "eval/reward_mean")[-1], abs=1e-6)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]


def test_without_an_evaluation_set_the_statistics_are_those_of_training(ranks, tmp_path):
    line = "task=rm train.max_steps=1 data.max_samples=24 eval.dataset=null eval.steps=-1 ds.lora.rank=2"
    ranks(1).call(small_run, tmp_path / "run", line)
    config = AutoConfig.from_pretrained(tmp_path / "run" / "model")
    assert config.reward_std > 0
