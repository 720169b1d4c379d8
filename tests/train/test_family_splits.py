"""Families with states, sinks or caps: one gradient of a step, however ranks, ZeRO and layouts split it."""

from __future__ import annotations

import pytest
import torch
from gradients import gradient
from plain_models import relative_error
from splits import Split

import families
from alike import begin_alike
from rlhf_suite.data.trajectory import Experience

pytestmark = pytest.mark.stack
LENGTHS = [9, 31, 4, 17, 17, 2, 25, 12]
# ZeRO-3 multiplies matrices in another order, and the gradients of decay rates are small differences of large numbers:
# 1.9e-5 there, 2.6e-7 with ZeRO 0 to 2.
LIMIT = 3e-5
WHOLE = Split("one micro-batch", micro=99)
PARTITIONED = Split("2 ranks, ZeRO-3, micro 2", ranks=2, zero=3, micro=2)
PADDED = Split("2 ranks, ZeRO-2, padded", ranks=2, zero=2, packed=False)
CHECKPOINTED = Split("ZeRO-3, checkpointing", zero=3, checkpointing="plain")
BY_HEADS = Split("sequence 2, ulysses", ranks=2, sequence=2, mode="ulysses")
TENSOR = Split("tensor 2", ranks=2, tensor=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")

    def folder(kind: str):
        if not (root / kind).exists():
            families.make_typed(root / kind / "lm", kind)
        return root / kind

    return folder


def batch() -> Experience:
    lengths = torch.tensor(LENGTHS)
    ids = torch.randint(0, 256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
    ids = begin_alike(ids, LENGTHS, [(1, 6, 20), (3, 6, 10), (4, 3, 17)])
    plain = Experience(ids, lengths, torch.ones(len(ids)), torch.arange(len(lengths)))
    plain.mask[plain.starts] = 0
    return plain


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        *((kind, split) for kind in ("qwen3_5_text", "lfm2", "nemotron_h") for split in (PARTITIONED, PADDED)),
        ("qwen3_5_text", CHECKPOINTED),
        ("kimi_linear", PARTITIONED),
        ("gpt_oss", PARTITIONED),
        *((kind, BY_HEADS) for kind in ("gpt_oss", "gemma2")),
        ("gemma2", TENSOR),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_gradient_does_not_depend_on_the_split(ranks, made, kind, split):
    wanted = ranks(1, 1).call(gradient, made(kind), "next token", WHOLE, batch())[0]
    found = ranks(split.ranks, split.tensor).call(gradient, made(kind), "next token", split, batch())[0]
    assert relative_error(found, wanted) <= LIMIT
