"""The models and the batch that the tests of the step, its optimisers and its gradients share."""

from __future__ import annotations

from collections.abc import Iterator

import gradients
import plain_models
import pytest
import torch

from rlhf_suite.distributed.mesh import Mesh, Rank
from rlhf_suite.distributed.worker import Worker
from rlhf_suite.distributed.world import World, open_store
from rlhf_suite.launch.address import LOOPBACK
from rlhf_suite.train.strategy import join_world


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return plain_models.make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def batch(folder):
    return gradients.make_batch(folder)


@pytest.fixture(scope="session")
def gpu_world() -> Iterator[World]:
    """The world of this process, alone on a GPU under DeepSpeed. Its store lives as long as its process group."""
    pytest.importorskip("deepspeed")
    store = open_store(LOOPBACK)
    rank = Rank(0, Mesh(1), LOOPBACK, store.port, "cuda")
    Worker(rank)
    yield join_world(rank)
    torch.distributed.destroy_process_group()
