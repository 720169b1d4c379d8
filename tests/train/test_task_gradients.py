"""Every loss of every supervised task has one gradient, that of its formula, whatever splits the step up.

Every loss and every split once; `python benchmarks/gradient_equality.py` computes all pairs.
"""

from __future__ import annotations

import gc

import pytest
import torch
from gradients import trained_model
from plain_models import reference_model, relative_error
from splits import SEQUENCE_SPLITS, SPLITS, Split, sampled
from task_cases import CASES, ROWS, Plain
from task_gradients import gradient, setup, wanted

from rlhf_suite.config.declarations.flags import walk
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import SUPERVISED
from rlhf_suite.config.plan.run_plan import models
from rlhf_suite.data.batch import sequences
from rlhf_suite.data.packing import PackedRows, balance
from rlhf_suite.train.frozen import load_frozen_roles
from rlhf_suite.train.loader import rank_micro_batches

pytestmark = pytest.mark.stack  # the tests without ranks too: they need the same models
LIMIT = 1e-5  # of fp32 against float64
SELECTORS = ("loss", "divergence")  # the flags of `algo` that choose a loss


@pytest.mark.notices(
    "the reference is the model that is trained",
    "train/frozen.py",
    "load_role(models[role]",
    'load_role(models["actor"]',
    cases="dpo and not LoRA",
)
@pytest.mark.notices(
    "the reference keeps the adapters on",
    "models/lora.py",
    "        layer._disable_adapters = True  #",
    "        layer._disable_adapters = False  #",
    cases="LoRA and (dpo or kto or distill)",
)
@pytest.mark.notices(
    "chosen and rejected are swapped",
    "tasks/dpo.py",
    "tokens[i::2]) for i in (0, 1))",
    "tokens[i::2]) for i in (1, 0))",
    cases="dpo and not LoRA",
)
@pytest.mark.notices(
    "KTO's reference point is that of the last micro-batch",
    "tasks/kto.py",
    "sums[label] += torch.stack(",
    "sums[label] = torch.stack(",
    cases="kto",
)
@pytest.mark.notices(
    "a step's reward is read at the token before its placeholder",
    "tasks/prm.py",
    "map_logits(model, batch, at, reward_logits)",
    "map_logits(model, batch, at - 1, reward_logits)",
    cases="prm",
)
@pytest.mark.notices(
    "the divergence is not scaled with the temperature",
    "tasks/distill.py",
    "coef * self.algo.temperature**2 * distance",
    "coef * distance",
    cases="distill and not LoRA",
)
@pytest.mark.parametrize(
    ("name", "split"),
    [*sampled(list(CASES), SPLITS), *sampled(list(CASES), SEQUENCE_SPLITS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_gradient_is_that_of_the_formula(ranks, folder, name, split):
    found = ranks(split.ranks).call(gradient, folder, name, split)[0]
    assert relative_error(found, wanted(folder, name, split)) <= LIMIT


@pytest.mark.parametrize("name", ["sft", "distill forward_kl"])
@pytest.mark.parametrize("split", [SPLITS[1], SPLITS[17]], ids=lambda split: split.name)
def test_full_rows_have_the_gradient_of_their_examples(ranks, folder, name, split):
    _, _, items = setup(folder, name, split)
    capacity = 3 * max(map(len, items))
    assert len(PackedRows(items, capacity)) < len(items) / 2
    found = ranks(split.ranks).call(gradient, folder, name, split, capacity)[0]
    assert relative_error(found, wanted(folder, name, split)) <= LIMIT


@pytest.mark.notices(
    "KTO's reference point is that of each rank",
    "tasks/kto.py",
    "reference_point(*total(sums).T)",
    "reference_point(*sums.T)",
)
def test_the_reference_point_of_kto_is_one_for_all_ranks(ranks, folder):
    split = Split("2 ranks", ranks=2, zero=2, micro=1)
    for name in ("kto", "kto vanilla"):
        found = ranks(2).call(gradient, folder, name, split)[0]
        assert relative_error(found, wanted(folder, name, split)) <= LIMIT, name


def logits_held(world, folder):
    """Number of tokens, and the shapes of all that is as large as their logits between the two passes."""
    config, task, items = setup(folder, "distill forward_kl", SPLITS[0])
    model = trained_model(world, folder, models(config)["actor"].head, SPLITS[0])
    task.frozen = load_frozen_roles(task, models(config), model)
    (batch,) = rank_micro_batches(items, range(len(items)), config.train, world)
    loss = task.loss(model, batch)
    tokens, found = int(batch.mask.sum()), [each for each in gc.get_objects() if torch.is_tensor(each)]
    model.backward(loss.sums["tokens"])
    return tokens, [tuple(each.shape) for each in found if each.ndim == 2 and each.numel() >= tokens * task.vocabulary]


def test_distillation_holds_the_logits_of_no_model_until_its_backward_pass(ranks, folder):
    tokens, wide = ranks(1).call(logits_held, folder)[0]
    assert tokens > 50 and tokens not in [rows for rows, _ in wide]


def selectable():
    """`<task>.<flag>=<value>` of every loss that a supervised task can be told to minimise."""
    for task in SUPERVISED:
        for flag in walk(Run.of(task)):
            section, _, name = flag.key.rpartition(".")
            if section == "algo" and name in SELECTORS:
                yield from (f"{task}.{name}={choice}" for choice in flag.meta.choices)


def test_every_loss_that_a_flag_selects_has_a_case():
    assert {choice for case in CASES.values() for choice in case.chosen} == set(selectable())


def test_every_supervised_task_has_a_case(folder):
    tasks = {setup(folder, name, SPLITS[0])[0].task for name in CASES}
    assert tasks == {*SUPERVISED}


def test_the_ranks_have_different_numbers_of_rows(folder):
    for name in CASES:
        _, _, items = setup(folder, name, SPLITS[0])
        assert len(items) == ROWS and len(set(map(len, balance([len(item) for item in items], 2)))) == 2


def plain(folder, name):
    return Plain(reference_model(folder, name).requires_grad_(False))


def test_the_reference_point_of_kto_is_above_zero(folder):
    """Otherwise the clamp would hide how it is averaged."""
    _, _, items = setup(folder, "kto", SPLITS[0])
    model, reference = plain(folder, "lm"), plain(folder, "reference")
    mismatched = [item.examples[1] for item in items]
    assert sum(float(model.answer(each)[0] - reference.answer(each)[0]) for each in mismatched) / len(items) > 1


def test_the_hinge_has_pairs_on_both_sides(folder):
    _, _, items = setup(folder, "dpo hinge", SPLITS[0])
    model, reference = plain(folder, "lm"), plain(folder, "reference")
    ratios = [[float(model.answer(x)[0] - reference.answer(x)[0]) for x in sequences(item)] for item in items]
    flat = [0.3 * (chosen - rejected) >= 1 for chosen, rejected in ratios]
    assert 1 < sum(flat) < ROWS - 1
