"""Frozen weights stay bit for bit, the others train as they would: under ZeRO, with checkpointing, after a resume."""

from __future__ import annotations

import gradients
import pytest
import steps
import torch
from plain_models import relative_error
from splits import Split
from steps import Setup, same

from rlhf_suite.models.weights import weights_on_cpu

pytestmark = pytest.mark.stack

FROZEN = ("model.embed_tokens", "model.layers.0.self_attn")
SPLITS = [
    Split("re-entrant checkpointing", checkpointing="re-entrant", freeze=FROZEN),
    Split("2 ranks, ZeRO-2", ranks=2, zero=2, micro=1, freeze=FROZEN),
    Split("2 ranks, ZeRO-3", ranks=2, zero=3, micro=2, freeze=FROZEN),
]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_the_others_have_the_gradient_of_the_formula(ranks, folder, batch, split):
    loss = "value" if split.zero == 2 else "next token"
    found = ranks(split.ranks).call(gradients.gradient, folder, loss, split, batch)[0]
    wanted = gradients.reference(folder, loss, batch)
    left = {name: value for name, value in wanted.items() if not name.startswith(FROZEN)}
    assert len(left) == len(wanted) - 7
    assert relative_error(found, left) <= 1e-5


def stopped_and_resumed(world, folder, setup, batch, path):
    """Weights before, after two steps, and after one step, a resume and another."""
    torch.manual_seed(0)
    model = steps.build(world, folder, setup)
    before = weights_on_cpu(model.module, model.gather)
    steps.one_step(model, batch, 0, setup)
    if world.is_main:
        path.mkdir()
    world.barrier()
    model.save_state(path)
    steps.one_step(model, batch, 1, setup)
    after = weights_on_cpu(model.module, model.gather)
    again = steps.build(world, folder, setup)
    again.load_state(path)
    steps.one_step(again, batch, 1, setup)
    return before, after, weights_on_cpu(again.module, again.gather)


@pytest.mark.parametrize(("size", "zero", "optim"), [(1, 2, "adam"), (2, 3, "adam"), (1, 2, "muon")])
def test_they_stay_as_they_were_also_over_a_resume(ranks, folder, batch, tmp_path, size, zero, optim):  # noqa: PLR0917
    setup = Setup(zero=zero, freeze=FROZEN, optim=optim, max_norm=float(optim == "adam"))
    before, after, resumed = ranks(size).call(stopped_and_resumed, folder, setup, batch, tmp_path / "state")[0]
    assert same(after, resumed)
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith(FROZEN)
    }


@pytest.mark.parametrize(("size", "dtype"), [(1, "fp32"), (2, "bf16")])
def test_adapters_of_4_bit_weights_train_also_over_a_resume(ranks, folder, batch, tmp_path, size, dtype):
    pytest.importorskip("bitsandbytes")
    setup = Setup(zero=2, lora=True, four_bits=True, dtype=dtype)
    before, after, resumed = ranks(size).call(stopped_and_resumed, folder, setup, batch, tmp_path / "state")[0]
    assert same(after, resumed)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if "_proj" in name
    }
