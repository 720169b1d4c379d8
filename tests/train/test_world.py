"""Random numbers: each rank has its own, and a resumed rank goes on with those it had."""

from __future__ import annotations

import os

import pytest
import torch
from steps import Setup, build

from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World, seed_process


def drawn(seed: int, rank: int, tensor: int = 1) -> list[float]:
    with torch.random.fork_rng():
        seed_process(TrainConfig.of("sft", seed=seed), World(rank, Mesh(4, tensor=tensor), torch.device("cpu")))
        return torch.rand(4).tolist()


@pytest.mark.notices(
    "every rank draws the same dropout",
    "distributed/world.py",
    "config.seed + world.mesh.replica_index(world.rank)",
    "config.seed",
)
def test_every_rank_and_every_seed_draws_numbers_of_its_own():
    """Dropout draws from them: ranks that drew the same would drop the same."""
    assert drawn(5, 0) == drawn(5, 0)
    assert drawn(5, 0) != drawn(5, 1) != drawn(5, 2)
    assert drawn(5, 0) != drawn(7, 0)


def limit_of_collectives(world: World) -> float:
    return torch.distributed.group.WORLD._get_backend(world.device).options._timeout.total_seconds()


@pytest.mark.notices(
    "ranks give a slow one up after ten minutes, though it shows signs of life",
    "train/strategy.py",
    '"timeout": COLLECTIVES',
    '"auto_mpi_discovery": True',
)
def test_ranks_wait_for_a_slow_one_as_long_as_the_driver_does(ranks):
    assert ranks(2).call(limit_of_collectives) == [86400.0, 86400.0]


@pytest.mark.notices(
    "ranks that split matrices drop other activations",
    "distributed/mesh.py",
    "return rank // self.tensor",
    "return rank",
)
def test_ranks_that_split_matrices_drop_the_same_activations():
    first, second, third, fourth = (drawn(5, rank, tensor=2) for rank in range(4))
    assert first == second != third == fourth


@pytest.mark.notices(
    "flash attention of transformers may differ from one time to the next",
    "distributed/world.py",
    ', "FLASH_ATTENTION_DETERMINISTIC": "1"',
    "",
)
def test_full_determinism_reaches_every_kernel_of_attention(monkeypatch):
    """Those of this suite ask torch (`models/flash.py`), those of transformers the environment."""
    monkeypatch.setattr("os.environ", dict(os.environ))
    try:
        with torch.random.fork_rng():
            for is_on in (False, True):
                config = TrainConfig.of("sft", full_determinism_enable=is_on)
                seed_process(config, World(0, Mesh(1), torch.device("cpu")))
                assert torch.are_deterministic_algorithms_enabled() is is_on
                assert ("FLASH_ATTENTION_DETERMINISTIC" in os.environ) is is_on
    finally:
        torch.use_deterministic_algorithms(False)


def continued(world, models, folder):
    """What rank 1 would have drawn after it was saved, and what it draws after it was loaded. Rank 0 was saved, too."""
    expected = []
    for rank in (0, 1):
        model = build(World(rank, Mesh(1), torch.device("cpu")), models, Setup())
        torch.manual_seed(rank)
        torch.rand(3)
        model.save_state(folder)
        expected = torch.rand(4).tolist()
    torch.manual_seed(99)
    model.load_state(folder)
    return expected, torch.rand(4).tolist()


@pytest.mark.notices(
    "every rank continues with the random numbers of the first",
    "train/strategy.py",
    'own := folder / f"rng_{self.world.rank}.pt"',
    'own := folder / "rng_0.pt"',
)
@pytest.mark.notices(
    "random numbers begin anew after a resume",
    "train/strategy.py",
    "set_rng_state(load_tensors(own))",
    "load_tensors(own)",
)
def test_a_resumed_rank_goes_on_with_its_own_random_numbers(ranks, folder, tmp_path):
    ((expected, found),) = ranks(1).call(continued, folder, tmp_path)
    assert found == expected
