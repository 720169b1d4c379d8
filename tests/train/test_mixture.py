"""The load-balancing loss of a mixture of experts is one function of a step, whatever splits the step up: its gradient
is that of the formula over all tokens at once, for every loss."""

from __future__ import annotations

import gradients
import pytest
import task_gradients
import torch
from deepspeed.utils import get_z3_leaf_modules
from plain_models import make_models, relative_error
from reshape import distance
from splits import Split
from steps import Setup, build, one_step
from task_cases import ROWS

from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.train.evaluate import evaluate

pytestmark = pytest.mark.stack

AUX = 10.0
LIMIT = 1e-5  # of fp32 against float64
TASKS = ("sft", "rm sigmoid", "dpo sigmoid", "kto", "prm, whole vocabulary", "distill forward_kl")
LOSSES = ("ppo, token-mean", "value")
SPLITS = [
    ("mixtral", Split("micro-batches of 1", micro=1, aux=AUX)),
    ("mixtral", Split("2 ranks, ZeRO-3", ranks=2, zero=3, micro=2, aux=AUX)),
    ("mixtral", Split("2 ranks that split the tokens", ranks=2, zero=2, micro=2, sequence=2, mode="ring", aux=AUX)),
    ("qwen3_moe", Split("padded", micro=3, packed=False, aux=AUX)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = make_models(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


@pytest.mark.notices(
    "the load-balancing loss of experts is not part of the step",
    "train/step.py",
    "ALL_TOKENS: model.config.aux_loss_coef * balance}",
    "ALL_TOKENS: 0.0 * balance}",
    cases="micro",
)
@pytest.mark.parametrize(("family", "split"), SPLITS, ids=lambda value: getattr(value, "name", value))
def test_the_gradient_is_that_of_the_formula(ranks, folder, family, split):
    path, group = folder(family), ranks(split.ranks)
    batch = gradients.make_batch(path)
    errors = {}
    for name in LOSSES:
        found = group.call(gradients.gradient, path, name, split, batch)[0]
        errors[name] = relative_error(found, gradients.reference(path, name, batch, aux=AUX))
    for name in TASKS:
        found = group.call(task_gradients.gradient, path, name, split)[0]
        errors[name] = relative_error(found, task_gradients.wanted(path, name, split))
    print(split.name, {name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) <= LIMIT, errors


def evaluation(world, folder, split):
    config, task, items = task_gradients.setup(folder, "sft", split)
    model = gradients.trained_model(world, folder, "lm", split)
    return evaluate(model, task, {"held out": items}, config.train)["eval/aux_loss"]


def test_an_evaluation_measures_it_over_all_micro_batches(ranks, folder):
    one, many = (Split("", micro=micro, aux=AUX) for micro in (ROWS, 1))
    found, wanted = (ranks(1).call(evaluation, folder("mixtral"), split)[0] for split in (many, one))
    assert found == pytest.approx(wanted, rel=1e-6)


def whole_modules(world, folder, batch, names):
    """Which modules ZeRO-3 gathers as a whole; the norm of the gradient and the weights after a step."""
    setup = Setup(zero=3, leaves=names)
    torch.manual_seed(0)
    model = build(world, folder, setup)
    norm = one_step(model, batch, 0, setup)["grad_norm"]
    leaves = sorted({type(each).__name__ for each in get_z3_leaf_modules(model.module)})
    return leaves, norm, weights_on_cpu(model.module, model.gather)


def test_zero3_gathers_the_modules_of_a_class_as_a_whole_and_trains_the_same(ranks, folder):
    path = folder("qwen3_moe")
    batch = gradients.make_batch(path)
    none, norm, plain = ranks(2).call(whole_modules, path, batch, ())[0]
    some, other_norm, found = ranks(2).call(whole_modules, path, batch, ("Qwen3MoeDecoderLayer",))[0]
    assert none == ["Qwen3MoeSparseMoeBlock"], "DeepSpeed knows this one"
    assert "Qwen3MoeDecoderLayer" in some
    assert other_norm == pytest.approx(norm, rel=1e-5)
    assert distance(found, plain) <= 1e-3, "Adam's first step is 1e-2 for every weight, even one without a gradient"


def test_a_class_that_the_model_has_not_is_refused(ranks, folder):
    path = folder("qwen3_moe")
    with pytest.raises(AssertionError, match=r"ds\.zero3_leaf_modules: the model has no module of class Other"):
        ranks(1).call(whole_modules, path, gradients.make_batch(path), ("Other",))
