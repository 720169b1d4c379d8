"""Every supervised task's step has one gradient, that of its formula, whatever splits the step up."""

from __future__ import annotations

import pytest
import task_gradients
from gradients import relative_error
from task_gradients import ROWS, SPLITS, TASKS, gradient, setup, wanted

from rlhf_suite.data.packing import balance

LIMIT = 1e-5  # of fp32 against float64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return task_gradients.make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def formula(folder):
    known = {}

    def get(name, split):
        key = (name, split.lora, split.sequences)
        if key not in known:
            known[key] = wanted(folder, name, split)
        return known[key]

    return get


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_the_gradient_is_that_of_the_formula(ranks, folder, formula, split):
    errors = {}
    for name in TASKS:
        found = ranks(split.ranks).call(gradient, folder, name, split)[0]
        errors[name] = relative_error(found, formula(name, split))
    print(split.name, {name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) <= LIMIT, errors


def test_the_ranks_have_different_numbers_of_rows(folder):
    for name in TASKS:
        _, _, items = setup(folder, name, SPLITS[0])
        assert len(items) == ROWS and len(set(map(len, balance([len(item) for item in items], 2)))) == 2


def test_the_reference_point_of_kto_is_above_zero(folder):
    """Otherwise the clamp would hide how it is averaged."""
    _, _, items = setup(folder, "kto", SPLITS[0])
    model, reference = (
        task_gradients.Plain(task_gradients.language_model(folder, name)) for name in ("lm", "reference")
    )
    mismatched = [item.examples[1] for item in items]
    assert sum(float(model.answer(each)[0] - reference.answer(each)[0]) for each in mismatched) / len(items) > 1
