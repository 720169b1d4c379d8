"""Tiny model folders of several families, and a batch of sequences of very different lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.models.builtin import Shape, create
from rlhf_suite.models.forward import LanguageModel, ScalarModel
from rlhf_suite.models.load import load_model

LENGTHS = [5, 70, 1, 130, 9]  # one sequence without any prediction


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor(LENGTHS)
    total = int(lengths.sum())
    return TokenBatch(torch.randint(0, 256, (total,), generator=generator), lengths, torch.ones(total))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder of the given shape, made once."""
    made: dict[Shape, Path] = {}

    def make(family: str = "qwen3", tied: bool = True) -> Path:
        shape = Shape(family=family, tied=tied)
        if shape not in made:
            path = tmp_path_factory.mktemp(family) / "model"
            create(path, shape)
            made[shape] = path
        return made[shape]

    return make


@pytest.fixture
def load(folder: Callable[..., Path]) -> Callable[..., LanguageModel | ScalarModel]:
    """A model with weights large enough for attention and logits to matter."""

    def make(
        family: str = "qwen3",
        tied: bool = True,
        head: str = "lm",
        packed: bool = True,
        attention: str = "varlen",
        path: Path | None = None,
    ) -> LanguageModel | ScalarModel:
        ds = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=packed, attn_implementation=attention)
        model = load_model(str(path or folder(family, tied)), head=head, ds=ds)
        return model if path else spread(model)

    return make


@torch.no_grad()
def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Add noise to every weight: at initialisation logits are flat and hide mistakes."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model
