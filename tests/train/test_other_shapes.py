"""A checkpoint of some ranks and some ZeRO stage is loaded at others, bit for bit, and the run goes on as it would.

`python benchmarks/resume_matrix.py` does it for every pair.
"""

from __future__ import annotations

import gradients
import pytest
import torch
from reshape import distance, load_and_go_on, save_and_go_on
from steps import Setup, build, one_step, same

from rlhf_suite.errors import UserError
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.train.parts import base_state, list_held_parts, state_of

pytestmark = pytest.mark.stack

# From ranks and setup to ranks and setup; the last number is the tolerance for the weights after three more steps.
PAIRS = [
    (1, Setup(0), 2, Setup(3)),
    (2, Setup(3), 1, Setup(2)),
    (2, Setup(1), 1, Setup(0)),
    (2, Setup(2), 2, Setup(2)),
    (2, Setup(2, "bf16"), 1, Setup(3, "bf16")),
    (1, Setup(None, "bf16"), 2, Setup(2, "bf16")),
    (2, Setup(3), 1, Setup(None)),
    (1, Setup(3, "bf16"), 2, Setup(1, "bf16")),
    (2, Setup(2, lora=True), 1, Setup(3, lora=True)),
    (1, Setup(2, offload=True), 2, Setup(3)),
    (2, Setup(1, tensor=2), 2, Setup(1, tensor=2)),
    (2, Setup(0, tensor=2), 4, Setup(3, tensor=2)),
    *(
        pytest.param(*pair, marks=pytest.mark.proof)
        for pair in (
            (4, Setup(2, tensor=2), 2, Setup(0, tensor=2)),
            (2, Setup(0, tensor=2), 4, Setup(2, tensor=2)),
            (4, Setup(2, "bf16", tensor=2), 2, Setup(1, "bf16", tensor=2)),
            (4, Setup(3, tensor=2), 4, Setup(3, tensor=2)),
            (4, Setup(3, tensor=2), 2, Setup(0, tensor=2)),
            (2, Setup(2, "bf16", tensor=2), 4, Setup(3, "bf16", tensor=2)),
            (4, Setup(3, "bf16", tensor=2), 2, Setup(3, "bf16", tensor=2)),
        )
    ),
]
TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2}  # sums over other ranks are rounded otherwise


@pytest.fixture(scope="session")
def batches(folder):
    return [gradients.make_batch(folder)] * 6


@pytest.mark.notices(
    "ZeRO-3: a whole matrix beside split ones is taken to be divided over fewer ranks than it is",
    "train/parts.py",
    "return torch.distributed.get_rank(group=parameter.ds_process_group)",
    "return torch.distributed.get_rank() // 2",
    cases="tensor and ZeRO-0 and ZeRO-3",
)
@pytest.mark.notices(
    "ZeRO-3: the parts of a whole matrix that ranks of another tensor index have are not read",
    "train/parts.py",
    "if is_own or name not in split:",
    "if is_own:",
    cases="tensor and ZeRO-0 and ZeRO-3",
)
@pytest.mark.parametrize(("size", "setup", "other_size", "other"), PAIRS, ids=str)
def test_a_run_goes_on_in_another_shape(ranks, folder, batches, tmp_path, size, setup, other_size, other):  # noqa: PLR0917
    first = ranks(size, setup.tensor).call(save_and_go_on, folder, setup, batches, tmp_path / "saved")[0]
    others = ranks(other_size, other.tensor).call(load_and_go_on, folder, other, batches, [tmp_path / "saved"])
    for number, second in enumerate(others):
        if number % setup.tensor == 0:  # it holds what rank 0 of the first run held
            assert same(second[0].state, first.state), "what is loaded is what was saved"
        is_same_shape = (size, setup) == (other_size, other)
        assert distance(second[0].weights, first.weights) <= (0 if is_same_shape else TOLERANCE[setup.dtype])
        assert [row["lr"] for row in second[0].metrics] == [row["lr"] for row in first.metrics]


def only_weights(world, folder, batches, checkpoint):
    """What is loaded of a checkpoint without the optimiser's state, and of a whole one without loading that state; the
    same step with fresh moments."""
    found = []
    for with_optimizer in (True, False):
        torch.manual_seed(0)
        model = build(world, folder, Setup(2))
        one_step(model, batches[0], 0, Setup(2))
        place = checkpoint / str(with_optimizer)
        place.mkdir(parents=True)
        model.save_state(place, with_optimizer=with_optimizer)
        saved = weights_on_cpu(model.module, model.gather)
        fresh = build(world, folder, Setup(2))
        fresh.load_state(place, with_optimizer=False)
        assert same(saved, weights_on_cpu(fresh.module, fresh.gather))
        found.append([*fresh.optimizer.optimizer.state.values()])
    sizes = [(checkpoint / str(each) / "state_0.pt").stat().st_size for each in (True, False)]
    return found, sizes


def test_weights_alone_take_a_third_of_the_space_and_the_moments_begin_anew(ranks, folder, batches, tmp_path):
    ((states, (whole, alone)),) = ranks(1).call(only_weights, folder, batches, tmp_path)
    assert states == [[], []]
    assert alone < 0.4 * whole


def other_parameters(world, folder, batches, checkpoint):
    model = build(world, folder, Setup(2, freeze=("model.embed_tokens",)))
    model.save_state(checkpoint)
    try:
        build(world, folder, Setup(2)).load_state(checkpoint)
    except UserError as error:
        return str(error)


def test_a_checkpoint_of_other_trained_parameters_is_refused(ranks, folder, batches, tmp_path):
    (said,) = ranks(1).call(other_parameters, folder, batches, tmp_path)
    assert "a checkpoint of another model, or of one in which other parameters are trained" in said
    assert "embed_tokens.weight" in said


def of_another_optimizer(world, folder, batches, checkpoint, saved, loaded):
    """Return why a checkpoint is refused, and the largest moment that is loaded of it when none are asked for."""
    model = build(world, folder, saved)
    one_step(model, batches[0], 0, saved)
    checkpoint.mkdir()
    model.save_state(checkpoint)
    with pytest.raises(UserError) as refused:
        build(world, folder, loaded).load_state(checkpoint)
    fresh = build(world, folder, loaded)
    fresh.load_state(checkpoint, with_optimizer=False)
    assert same(weights_on_cpu(model.module, model.gather), weights_on_cpu(fresh.module, fresh.gather))
    moments = [value for state in base_state(fresh.optimizer).values() for value in state.values()]
    return str(refused.value), max((float(value.abs().max()) for value in moments), default=0.0)


@pytest.mark.notices(
    "a checkpoint in which another optimiser has trained a parameter is continued with a mixed state",
    "train/parts.py",
    "if (saved := {*self.keys(name)}) and saved != {*keys}:",
    "if not (saved := {*self.keys(name)}):",
    cases="muon",
)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("saved", "loaded"), [("muon", "adam"), ("adam", "muon")])
def test_moments_of_another_optimizer_are_refused(ranks, folder, batches, tmp_path, saved, loaded, zero):  # noqa: PLR0917
    """ZeRO puts all parameters of a group into one row, so that moments of one of them would not be missed."""
    setups = [Setup(zero, optim=name, max_norm=0.0) for name in (saved, loaded)]
    ((said, largest),) = ranks(1).call(of_another_optimizer, folder, batches, tmp_path / "saved", *setups)
    assert largest == 0
    kept = {"adam": "exp_avg and exp_avg_sq", "muon": "momentum_buffer"}
    assert f"has {kept[saved]} of model.model.layers.0." in said
    assert f"the one of this run keeps {kept[loaded]}." in said and "ckpt.reset_optimizer=true" in said


def test_the_count_of_updates_is_no_moment_of_a_parameter_without_axes():
    """Its moments have the shape of the count, which belongs to the whole parameter, whoever holds it."""
    module = torch.nn.Module()
    module.scale = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.AdamW(module.parameters())
    module.scale.grad = torch.tensor(1.0)
    optimizer.step()
    (held,) = list_held_parts(module, optimizer)
    tensors, values = state_of(held, optimizer)
    assert ({*tensors}, {*values}) == ({"exp_avg", "exp_avg_sq"}, {"step"})
