"""A checkpoint is data: a pickle in the place of one of its files is refused, and its code is never run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import steps
import torch
from steps import Setup, same

from rlhf_suite.errors import UserError
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.train.ema import WeightAverage

SETUPS = [
    *((1, Setup(zero=zero)) for zero in (0, 1, 2, 3)),
    (1, Setup(zero=2, dtype="bf16")),
    (1, Setup(zero=1, optim="muon")),
    (2, Setup(zero=2, lora=True)),
    (2, Setup(zero=3)),
]


class Attack:
    """Unpickling it makes a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return Path.touch, (self.made,)


def attacked(world, folder, setup, batch, checkpoint):
    """What loading says for each file that is replaced, and whether the sound checkpoint loads afterwards."""
    torch.manual_seed(0)
    model = steps.build(world, folder, setup)
    average = WeightAverage(model, 0.5)
    steps.one_step(model, batch, 0, setup)
    if world.is_main:
        checkpoint.mkdir()
    world.barrier()
    model.save_state(checkpoint)
    average.save_state(checkpoint)
    world.barrier()
    saved = weights_on_cpu(model.module, model.gather)
    steps.one_step(model, batch, 1, setup)
    world.barrier()
    said = {}
    for file in sorted(checkpoint.rglob("*.pt")):
        before = file.read_bytes()
        world.barrier()
        if world.is_main:
            with file.open("wb") as stream:
                torch.save({"module": Attack(checkpoint / "made")}, stream)
        world.barrier()
        try:
            average.load_state(checkpoint) if file.name.startswith("ema") else model.load_state(checkpoint)
        except UserError as error:
            said[str(file.relative_to(checkpoint))] = str(error)
        world.barrier()
        file.write_bytes(before) if world.is_main else None
        world.barrier()
    model.load_state(checkpoint)
    return said, (checkpoint / "made").exists(), same(saved, weights_on_cpu(model.module, model.gather))


@pytest.mark.parametrize(("size", "setup"), SETUPS, ids=str)
def test_a_pickle_in_the_place_of_any_file_is_refused_and_not_run(ranks, folder, batch, tmp_path, size, setup):
    answers = ranks(size).call(attacked, folder, setup, batch, tmp_path / "state")
    files = {str(file.relative_to(tmp_path / "state")) for file in (tmp_path / "state").rglob("*.pt")}
    parts = size if setup.zero else 1
    assert len(files) == parts + 2 * size, "state, random numbers, average"
    said = {name: words for answer in answers for name, words in answer[0].items()}
    assert said.keys() == files
    for name, words in said.items():
        assert f"{name} is not a file of tensors and plain values (it asks for getattr)" in words
    for _, made, is_equal in answers:
        assert not made, "the code ran"
        assert is_equal, "the sound checkpoint no longer loads"


def test_the_attack_of_these_tests_works_on_an_ordinary_unpickler(tmp_path):
    pickle.loads(pickle.dumps(Attack(tmp_path / "made")))
    assert (tmp_path / "made").exists()
