"""Evaluation metrics are exact means over tokens, whatever the split; the model comes back as it was."""

from __future__ import annotations

import gradients
import pytest
import steps
import torch
from policy_formulas import NextToken

from rlhf_suite.config.train import TrainConfig
from rlhf_suite.data.batch import Example
from rlhf_suite.train.evaluate import evaluate
from rlhf_suite.train.supervised import set_names

SETS = {"short": (0, 2, 5, 8, 10), "long": (4, 9), "one": (7,), "nothing": (gradients.UNMASKED,)}


@pytest.fixture(scope="module")
def by_hand(folder, batch):
    """Of each sequence: (sum of -log p over its masked tokens, how many they are)."""
    alone = gradients.read_alone(folder, batch)
    return [(-float((s.log_probs * s.mask).sum()), float(s.mask.sum())) for s in alone]


def examples(batch, rows):
    inside = [batch.segments == row for row in rows]
    return [Example(batch.ids[part].tolist(), batch.tokens["mask"][part].int().tolist()) for part in inside]


def run(world, folder, zero, sets, config):
    model = steps.build(world, folder, steps.Setup(zero=zero))
    before = torch.get_rng_state()
    metrics = evaluate(model, NextToken(), sets, config)
    assert model.module.training
    assert all(p.grad is None for p in model.module.parameters())
    assert torch.equal(before, torch.get_rng_state())
    return metrics


@pytest.mark.parametrize(
    ("size", "zero", "config"),
    [
        (1, 0, TrainConfig(batch_size=4, micro_batch_size=2)),
        (1, 2, TrainConfig(batch_size=99, dynamic_batch_enable=True, max_tokens_per_gpu=75)),
        (2, 2, TrainConfig(batch_size=4, micro_batch_size=1)),
        (2, 3, TrainConfig(batch_size=99, micro_batch_size=2)),
    ],
)
def test_each_set_and_all_sets_by_hand(ranks, folder, batch, by_hand, size, zero, config):  # noqa: PLR0917
    sets = {name: examples(batch, rows) for name, rows in SETS.items()}
    for metrics in ranks(size).call(run, folder, zero, sets, config):
        assert set(metrics) == {"eval/short/gpt_loss", "eval/long/gpt_loss", "eval/one/gpt_loss", "eval/gpt_loss"}
        for name, rows in SETS.items():
            if name != "nothing":
                loss, count = (sum(by_hand[row][i] for row in rows) for i in (0, 1))
                assert metrics[f"eval/{name}/gpt_loss"] == pytest.approx(loss / count, rel=1e-6)
        everything = [by_hand[row] for rows in SETS.values() for row in rows]
        mean = sum(loss for loss, _ in everything) / sum(count for _, count in everything)
        assert metrics["eval/gpt_loss"] == pytest.approx(mean, rel=1e-6)


def test_sets_are_named_by_their_last_part_unless_two_share_it():
    assert set_names(["data/test.jsonl", "builtin:reverse_eval"]) == {
        "test": "data/test.jsonl",
        "builtin:reverse_eval": "builtin:reverse_eval",
    }
    twins = ["a/test.jsonl", "b/test.jsonl"]
    assert set_names(twins) == dict(zip(twins, twins, strict=True))


def test_no_set_no_metric(ranks, folder):
    assert ranks(1).call(run, folder, 0, {}, TrainConfig())[0] == {}
