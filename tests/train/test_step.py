"""The optimiser step: what is not finite never reaches the weights; metrics and norms are those of the whole step."""

from __future__ import annotations

from dataclasses import replace

import gradients
import pytest
import torch
from steps import Setup, same, train

from rlhf_suite.data.batch import take
from rlhf_suite.train.step import weigh_share
from rlhf_suite.train.task import StepLoss

pytestmark = pytest.mark.stack

SETUPS = [
    (1, Setup(zero=0)),
    (1, Setup(zero=1, dtype="bf16")),
    (1, Setup(zero=1, dtype="bf16", accumulate="bf16")),
    (1, Setup(zero=2)),
    (1, Setup(zero=2, dtype="bf16")),
    (1, Setup(zero=2, dtype="bf16", accumulate="bf16")),
    (1, Setup(zero=2, dtype="bf16", offload=True)),
    (1, Setup(zero=2, dtype="bf16", offload=True, accumulate="bf16")),
    (1, Setup(zero=1, dtype="bf16", offload=True)),
    (1, Setup(zero=3, dtype="bf16", offload=True)),
    (1, Setup(zero=2, offload=True)),
    (1, Setup(zero=2, optim="muon")),
    (1, Setup(zero=3)),
    (1, Setup(zero=3, dtype="bf16")),
    (2, Setup(zero=0)),
    (2, Setup(zero=1)),
    (2, Setup(zero=1, overlap=True)),
    (2, Setup(zero=2)),
    (2, Setup(zero=2, dtype="bf16")),
    (2, Setup(zero=3)),
]


@pytest.fixture(scope="module")
def poisoned(batch):
    """One token of sequence 4 has a NaN for its advantage."""
    advantages = batch.advantages.clone()
    masked = (batch.mask * (batch.segments == 4)).nonzero().flatten()
    advantages[masked[0]] = torch.nan
    return replace(batch, advantages=advantages)


@pytest.mark.notices(
    "a step that is not finite updates the weights",
    "train/optim.py",
    "                parameter.grad = None",
    "                pass",
    cases="1-ZeRO-0",
)
@pytest.mark.parametrize(("size", "setup"), SETUPS, ids=str)
def test_a_step_that_is_not_finite_leaves_no_trace(ranks, folder, batch, poisoned, size, setup):
    """Neither in the weights nor in the optimiser's moments, which the step after it would show."""
    setup = replace(setup, objective="ppo")
    skipped = ranks(size).call(train, folder, setup, [batch, poisoned, batch])
    left_out = ranks(size).call(train, folder, setup, [batch, None, batch])
    for with_nan, without in zip(skipped, left_out, strict=True):
        assert [row["skipped"] for row in with_nan.metrics] == [0, 1, 0]
        assert with_nan.metrics[1]["grad_norm"] == torch.inf
        assert same(with_nan.weights, without.weights)
    start = ranks(size).call(train, folder, setup, [])[0]
    assert not same(start.weights, skipped[0].weights)


@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 2)])
def test_an_infinite_loss_with_a_finite_gradient_is_skipped_too(ranks, folder, batch, size, zero):
    setup = Setup(zero=zero, objective="infinite")
    for outcome, start in zip(
        ranks(size).call(train, folder, setup, [batch]), ranks(size).call(train, folder, setup, []), strict=True
    ):
        assert outcome.metrics[0]["skipped"] == 1
        assert same(outcome.weights, start.weights)


@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 0), (2, 2), (2, 3)])
def test_stop_names_the_sequences_on_every_rank_and_updates_nothing(ranks, folder, batch, poisoned, size, zero):
    setup = Setup(zero=zero, objective="ppo", on_nonfinite="stop")
    stopped = ranks(size).call(train, folder, setup, [batch, poisoned, batch])
    before = ranks(size).call(train, folder, setup, [batch])
    assert len({outcome.error for outcome in stopped}) == 1
    error = stopped[0].error
    assert error.startswith("step 2: the loss or its gradient is not finite; nothing was updated. The loss came from ")
    assert "sequence 4" in error
    assert error.count("sequence ") == 3, "the micro-batch of 3 that holds it, and no other"
    assert "train.on_nonfinite=skip" in error
    for one, other in zip(stopped, before, strict=True):
        assert same(one.weights, other.weights)


@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 0), (1, 2), (2, 1), (2, 2), (2, 3)])
def test_loss_and_norm_are_those_of_the_whole_step(ranks, folder, batch, size, zero):
    """Also where every rank sees a part, and before the clip."""
    wanted = gradients.reference(folder, "next token", batch)
    norm = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    alone = gradients.read_alone(folder, batch)
    loss = -sum((s.log_probs * s.mask).sum() for s in alone) / sum(s.mask.sum() for s in alone)
    for outcome in ranks(size).call(train, folder, Setup(zero=zero, max_norm=0.1), [batch]):
        assert outcome.metrics[0]["gpt_loss"] == pytest.approx(float(loss), rel=1e-6)
        assert outcome.metrics[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert outcome.metrics[0]["lr"] == 1e-2


def test_a_rank_without_masked_tokens_takes_part(ranks, folder, batch):
    """Two sequences, one of them without masked tokens: its rank has nothing to train on, and the metrics are whole."""
    few = take(batch, [4, gradients.UNMASKED])
    (one,) = ranks(1).call(train, folder, Setup(zero=2), [few])
    for outcome in ranks(2).call(train, folder, Setup(zero=2), [few]):
        assert outcome.metrics[0]["gpt_loss"] == pytest.approx(one.metrics[0]["gpt_loss"], rel=1e-6)
        for name, weight in outcome.weights.items():
            torch.testing.assert_close(weight, one.weights[name], rtol=1e-4, atol=1e-5)


def test_a_batch_without_any_masked_token_changes_nothing(ranks, folder, batch):
    nothing = take(batch, [gradients.UNMASKED])
    outcome, start = (ranks(1).call(train, folder, Setup(), plan)[0] for plan in ([nothing], []))
    assert outcome.metrics[0]["grad_norm"] == 0
    assert same(outcome.weights, start.weights)


@pytest.mark.notices(
    "a unit of less than one counts as one", "train/step.py", "counts[name] or 1.0", "max(counts[name], 1.0)"
)
def test_a_unit_of_less_than_one_is_divided_by_what_it_is():
    """An aggregation of one's own may count in other units than tokens and sequences."""
    loss = StepLoss({"own": torch.tensor(1.0), "none": torch.tensor(0.0)}, {})
    assert float(weigh_share(loss, {"own": 0.5, "none": 0.0})) == 2.0
