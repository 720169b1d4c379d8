"""Ranks that split the matrices of a model train it as one rank does, and its folder is the same."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from steps import Setup, build, one_step, same
from transformers import AutoConfig

from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import Shape, create
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.train import tensor_parallel

pytestmark = pytest.mark.stack
STEPS = 4
CLIPPED = 0.05  # a norm that every step is above
MOVED = "model.layers.1.mlp.up_proj.weight"
SETUPS = [
    Setup(0),
    Setup(1),
    Setup(2),
    Setup(1, "bf16"),
    Setup(2, "bf16"),
    Setup(1, offload=True),
    Setup(2, sleeps=True),
    Setup(3),
    Setup(2, freeze=("model.layers.0.self_attn.q_norm", "model.embed_tokens")),
]


def run(world, folder, setup, batch):
    """The whole weights before and after clipped steps, which are also looked at between any two; the metrics; and how
    many numbers this rank holds of split matrices."""
    torch.manual_seed(0)
    model = build(world, folder, replace(setup, max_norm=CLIPPED))
    seen, metrics = [weights_on_cpu(model.module, model.gather)], []
    if setup.sleeps:
        model.optimizer_to_host()
    for step in range(STEPS):
        with model.optimizer_on_device() if setup.sleeps else nullcontext():
            metrics.append(one_step(model, batch, step, setup))
        seen.append(weights_on_cpu(model.module, model.gather))
    return seen, metrics, sum(p.numel() for p in model.module.parameters() if tensor_parallel.is_shard(p))


@pytest.fixture(scope="module")
def wanted(ranks, folder, batch):
    known = {}

    def get(setup):
        if setup not in known:
            (known[setup],) = ranks(1).call(run, folder, setup, batch)
        return known[setup]

    return get


@pytest.mark.notices(
    "the norm counts the gradients of whole parameters once per rank that splits matrices",
    "train/tensor_parallel.py",
    "if p.grad is not None and (is_first or is_shard(p))",
    "if p.grad is not None",
    cases="fp32 and (ZeRO-0 or ZeRO-2)",
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.proof)])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_clipped_steps_are_those_of_one_rank_and_looking_at_the_weights_changes_nothing(
    ranks, folder, batch, wanted, setup, size
):
    weights, metrics, _ = wanted(setup)
    exact = setup.dtype == "fp32"
    for theirs, found, _ in ranks(size, 2).call(run, folder, replace(setup, tensor=2), batch):
        assert same(theirs[0], weights[0]), "the whole weights are those of the folder, bit for bit"
        for row, right in zip(found, metrics, strict=True):
            assert row == pytest.approx(right, rel=1e-4 if exact else 3e-2)
            assert row["grad_norm"] > 2 * CLIPPED
        for now, right in zip(theirs[1:], weights[1:], strict=True):
            for name, value in right.items():
                torch.testing.assert_close(now[name], value, rtol=0, atol=2e-4 if exact else 8e-2, msg=name)
    assert float((weights[-1][MOVED] - weights[0][MOVED]).abs().max()) > 1e-2


def test_a_rank_holds_a_part_of_every_matrix_of_the_layers(ranks, folder, batch):
    both = ranks(2, 2).call(run, folder, Setup(2, tensor=2), batch)
    whole = sum(value.numel() for name, value in both[0][0][0].items() if name.endswith("proj.weight"))
    assert [held for *_, held in both] == [whole // 2] * 2


@pytest.mark.notices(
    "layers whose plan has other ways to split are split all the same",
    "train/tensor_parallel.py",
    "if not plan or other or sees:",
    "if not plan or sees:",
)
@pytest.mark.notices(
    "heads are split that the ranks do not divide",
    "train/tensor_parallel.py",
    "if value is not None and value % size:",
    "if value is not None and size % value:",
)
@pytest.mark.parametrize(
    ("family", "size", "said"),
    [
        ("qwen3", 2, None),
        ("llama", 2, None),
        ("qwen3", 4, "does not divide the model's num_key_value_heads=2"),
        ("mixtral", 2, "the layers of mixtral cannot be split"),
        ("qwen3_moe", 2, "the layers of qwen3_moe cannot be split"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason(tmp_path, family, size, said):
    create(tmp_path / "model", Shape(family=family))
    config = AutoConfig.from_pretrained(tmp_path / "model")
    if said is None:
        assert {*tensor_parallel.check_plan(config, size).values()} >= {"colwise", "rowwise"}
    else:
        with pytest.raises(UserError, match=said):
            tensor_parallel.check_plan(config, size)
