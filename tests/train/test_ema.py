"""The average of the weights is that of the formula however they are partitioned; it comes back bit for bit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from steps import Outcome, Setup, build, one_step, same

from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.train.ema import WeightAverage, share_out

pytestmark = pytest.mark.stack

BETA = 0.75
SETUPS = [
    *((1, Setup(zero=zero)) for zero in (0, 3)),
    *((1, Setup(zero=zero, dtype="bf16")) for zero in (1, 2)),
    (1, Setup(zero=2, lora=True)),
    *((2, Setup(zero=zero)) for zero in (2, 3)),
    (2, Setup(zero=3, whole=500)),
]


def averaged(world, folder, setup, batch, checkpoint):
    """Weights before and after each of three steps; the average in their place; the weights after that. The average
    is saved after the second step, and goes on in a second object that has been loaded from there."""
    torch.manual_seed(0)
    model = build(world, folder, setup)
    weights = [weights_on_cpu(model.module, model.gather)]
    average = WeightAverage(model, BETA)
    for step in range(3):
        if step == 2:
            average.save_state(checkpoint)
            world.barrier()
            average = WeightAverage(model, BETA)
            average.load_state(checkpoint)
        one_step(model, batch, step, setup)
        average.update()
        weights.append(weights_on_cpu(model.module, model.gather))
    with average.in_place():
        weights.append(weights_on_cpu(model.module, model.gather))
    weights.append(weights_on_cpu(model.module, model.gather))
    one_step(model, batch, 3, setup)
    weights.append(weights_on_cpu(model.module, model.gather))
    return weights


def test_ranks_that_have_all_parameters_share_the_averages_out():
    sizes = {"embedding": 100, "a": 40, "b": 40, "c": 30, "norm": 1}
    owners = share_out(sizes, 2)
    loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(2)]
    assert owners.keys() == sizes.keys() and sorted(loads) == [101, 110]
    assert share_out(dict(reversed(sizes.items())), 2) == owners, "every rank says the same"


def kept(world, folder, setup):
    """The numbers that this rank averages, and those of the model."""
    average = WeightAverage(build(world, folder, setup), BETA)
    return sum(value.numel() for value in average.average.values()), sum(p.numel() for _, p in average.parts().values())


def test_no_rank_averages_all_parameters(ranks, folder):
    (one, whole), (other, _) = ranks(2).call(kept, folder, Setup(zero=2))
    assert one + other == whole and min(one, other) > 0.3 * whole


def plain(world, folder, setup, batch):
    """Four steps without any average."""
    torch.manual_seed(0)
    model, outcome = build(world, folder, setup), Outcome()
    for step in range(4):
        one_step(model, batch, step, setup)
    outcome.weights = weights_on_cpu(model.module, model.gather)
    return outcome


@pytest.mark.notices(
    "the average of the weights decays the wrong way round",
    "train/ema.py",
    "mul_(self.beta).add_(parts[name][1].cpu(), alpha=1 - self.beta)",
    "mul_(1 - self.beta).add_(parts[name][1].cpu(), alpha=self.beta)",
)
@pytest.mark.notices(
    "the average of the weights starts at 0",
    "train/ema.py",
    "part.float().cpu().clone()",
    "part.float().cpu() * 0",
    cases="1-ZeRO-0",
)
@pytest.mark.notices(
    "a rank exports the average of its own parameters alone",
    "train/ema.py",
    "dist.broadcast(parameters[name], src=owner)",
    "pass",
    cases="2-ZeRO-2",
)
@pytest.mark.parametrize(("size", "setup"), SETUPS, ids=str)
def test_the_average_is_that_of_the_formula_and_stays_beside_the_training(ranks, folder, batch, tmp_path, size, setup):
    start, *steps, average, after, last = ranks(size).call(averaged, folder, setup, batch, tmp_path)[0]
    assert len(list(tmp_path.glob("ema_*.pt"))) == size
    moved = 0
    for name, weight in start.items():
        wanted = weight.float()
        for each in steps:
            wanted = BETA * wanted + (1 - BETA) * each[name].float()
        if not setup.lora:  # adapters are averaged, and their product is merged
            tolerance = 4e-3 if setup.dtype == "bf16" else 1e-6
            torch.testing.assert_close(average[name].float(), wanted, rtol=tolerance, atol=tolerance)
        moved += not torch.equal(average[name], weight) and not torch.equal(average[name], steps[-1][name])
    assert moved > len(start) / 2
    assert same(after, steps[-1])
    assert same(last, ranks(size).call(plain, folder, setup, batch)[0].weights)


def log_probs_of_average(world, folder, setup, batch):
    """Of all ranks' tokens, by the average right after an optimiser step, and by the weights after that."""
    torch.manual_seed(0)
    model = build(world, folder, setup)
    average, found = WeightAverage(model, BETA), list[torch.Tensor]()
    one_step(model, batch, 0, setup)
    average.update()
    for context in (average.in_place(), nullcontext()):
        with context, torch.no_grad():
            found.append(token_log_probs(model, batch, temperature=1.0, masked=True).log_probs)
    return found


@pytest.mark.notices(
    "ZeRO-3: a pass reads whole parameters from before the average took their place, or gave it back",
    "train/strategy.py",
    "self.engine.optimizer.empty_partition_cache()",
    "pass",
)
@pytest.mark.parametrize("whole", [0, 500])
def test_passes_read_the_average_while_it_is_in_place_and_the_weights_after_it(ranks, folder, batch, whole):
    """ZeRO-3 keeps parameters whole that are small, or that a pass has read, and ZeRO-2 divides none."""
    plain, found = (
        ranks(2).call(log_probs_of_average, folder, setup, batch)[0]
        for setup in (Setup(zero=2), Setup(zero=3, whole=whole))
    )
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-4)
    assert not torch.allclose(*plain, atol=1e-2)
