"""The parameters that `actor.freeze` names get no gradient, all others do; patterns without a match are refused."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.ds import LoRAConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.prepare import make_trainable


def frozen(model, *patterns):
    make_trainable(model, TrainedModelConfig.of("ppo", freeze=list(patterns)), LoRAConfig())
    return {name for name, p in model.model.named_parameters() if not p.requires_grad}


def test_a_module_is_frozen_by_its_whole_name_and_nothing_that_begins_like_it(load):
    assert frozen(load(), "model.layers.1.mlp") == {
        f"model.layers.1.mlp.{n}_proj.weight" for n in ("gate", "up", "down")
    }
    assert not frozen(load(), "model.layers.0.self_attn.q_proj") & {"model.layers.0.self_attn.q_norm.weight"}


def test_patterns_are_regular_expressions(load):
    names = frozen(load(), ".*norm.*", r"model\.layers\.[0]")
    assert "model.norm.weight" in names and "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.1.mlp.up_proj.weight" not in names and "model.embed_tokens.weight" not in names


def test_a_tied_matrix_is_frozen_under_either_name(load):
    assert frozen(load(), "lm_head") == frozen(load(), "model.embed_tokens") == {"model.embed_tokens.weight"}
    assert frozen(load(tied=False), "lm_head") == {"lm_head.weight"}
    assert frozen(load(head="value"), "score") == {"score.weight"}


def test_names_that_match_nothing_or_everything_are_refused(load):
    with pytest.raises(
        UserError, match=r"critic.freeze: no parameter or module matches 'layers.0'. The model has .*lm_head"
    ):
        make_trainable(load(), TrainedModelConfig.of("ppo", freeze=["layers.0"]), LoRAConfig(), section="critic")
    with pytest.raises(UserError, match="freezes the whole model"):
        frozen(load(), "model", "lm_head")
