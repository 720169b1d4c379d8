"""A flag of training does what it says for every type of models, or is refused: none is ignored for a family."""

from __future__ import annotations

import math
import re

import pytest
import torch
from family_errors import batch

import families
from image_families import make_seeing
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.adapters import unadapted_matrices
from rlhf_suite.models.forward import LanguageModel, token_log_probs
from rlhf_suite.models.load import load_model
from rlhf_suite.models.lora import add_lora
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.models.weights import in_full, pieces

IN_CI = ("llama", "qwen2_moe", "glm4_moe", "lfm2")
TYPES = [kind if kind in IN_CI else pytest.param(kind, marks=pytest.mark.proof) for kind in families.TYPES]
OTHERS = re.compile(r"embed|lm_head|conv|bias|A_log")
FP32 = DeepSpeedConfig.of("sft", param_dtype="fp32")


@pytest.fixture
def path(tmp_path, kind) -> str:
    families.make_typed(tmp_path / kind, kind)
    return str(tmp_path / kind)


def trainable(path: str, **flags: float) -> LanguageModel:
    model = load_model(path, head="lm", ds=FP32)
    make_trainable(model, TrainedModelConfig.of("ppo", **flags), LoRAConfig())
    return model


def numbers_kept(model: LanguageModel) -> int:
    """Return how many numbers a forward pass keeps for the backward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        token_log_probs(model, batch())
    return sum(kept)


@pytest.mark.parametrize("kind", TYPES)
def test_checkpointing_keeps_less_of_a_forward_pass(path):
    few, all_of_them = (numbers_kept(trainable(path, gradient_checkpointing_enable=on)) for on in (True, False))
    assert few < all_of_them / 4


@pytest.mark.parametrize("kind", TYPES)
def test_the_balance_of_experts_moves_their_router_or_is_refused(path, kind):
    """Of uniform choices the loss is the number of experts of a token, which is 2 or here 1 in Llama 4."""
    try:
        model = trainable(path, aux_loss_coef=0.01)
    except UserError as error:
        assert "no experts to balance" in str(error) and not any("expert" in name for name in families.TYPES[kind])
        return
    loss = token_log_probs(model, batch()).aux_loss
    assert loss is not None and math.isclose(loss.item(), model.model.config.num_experts_per_tok, rel_tol=0.1)
    loss.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert any(name.endswith(("gate.weight", "router.weight")) for name in moved)


@pytest.mark.notices(
    "a run does not say that the shared experts of GLM-4.5 have no adapter",
    "models/adapters.py",
    "not any(part in adapted for part in parents(name))",
    "not any(adapted for part in parents(name))",
    cases="glm4_moe",
)
@pytest.mark.parametrize("kind", TYPES)
def test_a_run_names_the_matrices_that_adapters_do_not_change(path, kind):
    """Matrices are multiplied with tokens: they are no embeddings, heads or kernels of convolutions."""
    lora = LoRAConfig(rank=2)
    named = unadapted_matrices(path, "actor.model_name_or_path", DeepSpeedConfig.of("sft", lora=lora))
    model = load_model(path, head="lm", ds=FP32)
    add_lora(model, lora, 0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter)
    same = set()
    for piece in pieces(model.model):
        before, after = piece.base_values(in_full), piece.values(in_full, in_full)
        same |= {name for name in after if after[name].dim() > 1 and torch.equal(before[name], after[name])}
    matrices = {re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight")) for name in same if not OTHERS.search(name)}
    assert matrices == {*named}
    assert matrices or kind != "glm4_moe"


def test_an_image_model_without_a_full_set_of_adapters_is_named_too(tmp_path):
    make_seeing(tmp_path / "seeing", "qwen3_5_moe")
    ds = DeepSpeedConfig.of("sft", lora=LoRAConfig(rank=2))
    named = unadapted_matrices(str(tmp_path / "seeing"), "actor.model_name_or_path", ds)
    assert "model.language_model.layers.*.mlp.experts.down_proj" in named
