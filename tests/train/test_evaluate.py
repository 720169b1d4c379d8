"""Evaluation metrics are exact over the whole set, whatever the split; the model comes back as it was."""

from __future__ import annotations

import gradients
import pytest
import steps
import task_gradients
import torch
from plain_models import reference_model
from policy_formulas import NextToken
from splits import Split
from task_cases import CASES, Plain
from task_formulas import MINUS, PLACEHOLDER, PLUS

from rlhf_suite.config.check.sources import metric_names
from rlhf_suite.config.declarations.runs import TASKS
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.config.plan.run_plan import models
from rlhf_suite.data.batch import Example
from rlhf_suite.train.evaluate import evaluate
from rlhf_suite.train.frozen import load_frozen_roles, prepare_batches

SETS = {"short": (0, 2, 5, 8, 10), "long": (4, 9), "one": (7,), "nothing": (gradients.UNMASKED,)}


@pytest.fixture(scope="module")
def by_hand(folder, batch):
    """Of each sequence: (sum of -log p over its masked tokens, how many they are)."""
    alone = gradients.read_alone(folder, batch)
    return [(-float((s.log_probs * s.mask).sum()), float(s.mask.sum())) for s in alone]


def examples(batch, rows):
    inside = [batch.segments == row for row in rows]
    return [Example(batch.ids[part].tolist(), batch.mask[part].int().tolist()) for part in inside]


def run(world, folder, zero, sets, config):
    model = steps.build(world, folder, steps.Setup(zero=zero))
    before = torch.get_rng_state()
    metrics = evaluate(model, NextToken(), sets, config)
    assert model.module.training
    assert all(p.grad is None for p in model.module.parameters())
    assert torch.equal(before, torch.get_rng_state())
    return metrics


@pytest.mark.notices(
    "an evaluation leaves its last short batch out",
    "train/evaluate.py",
    "for start in range(0, len(items), size)",
    "for start in range(0, len(items) - size + 1, size)",
)
@pytest.mark.notices(
    "after an evaluation there is no dropout any more", "train/evaluate.py", "model.module.train()", "pass"
)
@pytest.mark.parametrize(
    ("size", "zero", "config"),
    [
        (1, 0, TrainConfig.of("sft", batch_size=4, micro_batch_size=2)),
        (1, 2, TrainConfig.of("sft", batch_size=99, dynamic_batch_enable=True, max_tokens_per_gpu=75)),
        (2, 2, TrainConfig.of("sft", batch_size=4, micro_batch_size=1)),
        (2, 3, TrainConfig.of("sft", batch_size=99, micro_batch_size=2)),
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
    assert metric_names(["data/test.jsonl", "builtin:reverse_eval"]) == ["test", "builtin:reverse_eval"]
    twins = ["a/test.jsonl", "b/test.jsonl"]
    assert metric_names(twins) == twins


def test_no_set_no_metric(ranks, folder):
    assert ranks(1).call(run, folder, 0, {}, TrainConfig.of("sft"))[0] == {}


def of_task(world, folder, name, split):
    config, task, items = task_gradients.setup(folder, name, split)
    model = gradients.trained_model(world, folder, models(config)["actor"].head, split)
    task.frozen = load_frozen_roles(task, models(config), model)
    return evaluate(model, task, {"set": items}, config.train, lambda batches: prepare_batches(task, model, batches))


def ranked(folder, name):
    """(score, whether it should be high) of each answer or step, by plain models."""
    _, _, items = task_gradients.setup(folder, name, Split("all"))
    model, reference = (Plain(reference_model(folder, each).requires_grad_(False)) for each in ("lm", "reference"))
    if name == "kto":
        answers = [item.examples[0] for item in items]
        return [(model.answer(x)[0] - reference.answer(x)[0], x.numbers["label"] == 1) for x in answers]
    places = [(x, at) for x in items for at, token in enumerate(x.ids) if token == PLACEHOLDER]
    logits = [(model.logits(x)[at], x.token_numbers["target"][at] == 0) for x, at in places]
    return [(row[PLUS] - row[MINUS], good) for row, good in logits]


@pytest.mark.parametrize("name", ["kto", "prm, two reward tokens"])
def test_the_auc_counts_all_pairs_of_a_right_and_a_wrong_one_over_ranks_and_micro_batches(ranks, folder, name):
    scores = ranked(folder, name)
    pairs = [float(a > b) for a, high in scores for b, other in scores if high and not other]
    expected = sum(pairs) / len(pairs)
    assert 0.1 < expected < 0.9 and len(pairs) > 9
    for split in (Split("one"), Split("two", micro=2), Split("ranks", ranks=2, zero=2, micro=1)):
        for metrics in ranks(split.ranks).call(of_task, folder, name, split):
            assert metrics["eval/auc"] == metrics["eval/set/auc"] == pytest.approx(expected)


def test_a_judge_of_the_whole_vocabulary_has_no_good_token_to_rank_by(ranks, folder):
    split = Split("one")
    assert "eval/auc" not in ranks(1).call(of_task, folder, "prm, whole vocabulary", split)[0]


def test_what_each_task_measures_is_what_the_preflight_takes_for_the_best_metric(ranks, folder):
    measured = {}
    for name in CASES:
        task = task_gradients.setup(folder, name, Split("one"))[0].task
        names = ranks(1).call(of_task, folder, name, Split("one"))[0]
        measured.setdefault(task, set()).update(each.removeprefix("eval/") for each in names if each.count("/") == 1)
    assert {task: names - {"aux_loss"} for task, names in measured.items()} == {
        task: set(TASKS[task].evaluated) - {"aux_loss"} for task in measured
    }


def watched(world, folder, sets):
    """Whether the model was in training mode at each loss of an evaluation, and whether it is after it."""
    modes = []

    class Watching(NextToken):
        def loss(self, model, batch):
            modes.append(model.model.module.training)
            return super().loss(model, batch)

    model = steps.build(world, folder, steps.Setup())
    evaluate(model, Watching(), sets, TrainConfig.of("sft", batch_size=4, micro_batch_size=2))
    return modes, model.module.training


@pytest.mark.notices("an evaluation draws dropout", "train/evaluate.py", "model.module.eval()", "pass")
def test_an_evaluation_draws_no_dropout_and_training_goes_on_with_it(ranks, folder, batch):
    ((modes, after),) = ranks(1).call(watched, folder, {"set": examples(batch, (0, 2, 5))})
    assert modes == [False, False] and after
