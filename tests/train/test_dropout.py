"""Dropout of a model's own configuration: off where old log-probs are compared with new ones, and kept when saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM, PretrainedConfig

from rlhf_suite.config.declarations.algo import KLConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import (
    ActorConfig,
    TrainedModelConfig,
)
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.world import World
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.models.dropout import dropout_rates, set_dropout, switch_off_dropout
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.rl.objectives import PolicyObjective
from rlhf_suite.train.export import export
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.strategy import load_trained

SMALL = {"vocab_size": 264, "num_attention_heads": 2, "hidden_size": 32, "num_hidden_layers": 2}
GPT2 = GPT2Config(**SMALL, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
OPT = OPTConfig(**SMALL, word_embed_proj_dim=32, ffn_dim=64, dropout=0.1, attention_dropout=0.1, layerdrop=0.1)


@pytest.fixture(scope="module", params=["gpt2", "opt"])
def dropping(request, tmp_path_factory) -> Path:
    """A model with dropout in its configuration."""
    folder = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = GPT2LMHeadModel(GPT2) if request.param == "gpt2" else OPTForCausalLM(OPT)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def first_step(world: World, folder: Path, section: TrainedModelConfig, output: Path) -> dict[str, float]:
    """The metrics of a first optimiser step, against log-probs measured just before; the model goes to `output`."""
    ds = DeepSpeedConfig.of("sft", zero_stage=0, param_dtype="fp32", attn_implementation="eager")
    section = replace(section, model_name_or_path=str(folder))
    model = load_trained(ModelPlan("actor", section.model_name_or_path), section, ds, world, total_steps=1, seed=0)
    torch.manual_seed(3)
    lengths = torch.tensor([40, 60, 20])
    batch = Experience(torch.randint(0, 256, (120,)), lengths, torch.ones(120), torch.arange(3))
    batch.mask[batch.starts] = 0
    model.module.eval()
    with torch.no_grad():
        old = token_log_probs(model, batch).log_probs
    model.module.train()
    batch = replace(batch, old_log_probs=old, advantages=torch.randn(120))
    objective = PolicyObjective(ActorConfig.of("ppo"), KLConfig(), temperature=1.0, horizon=60)
    metrics = optimizer_step(model, objective, [batch], 0, "stop")
    export(model, byte_tokenizer(), output)
    return metrics


def test_all_ratios_are_one_before_any_update(ranks, dropping, tmp_path):
    (metrics,) = ranks(1).call(first_step, dropping, ActorConfig.of("ppo"), tmp_path / "model")
    assert metrics["ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["ppo_clip_ratio"] == 0


def test_the_flag_keeps_the_dropout_of_the_model(ranks, dropping, tmp_path):
    (metrics,) = ranks(1).call(first_step, dropping, ActorConfig.of("ppo", disable_dropout=False), tmp_path / "model")
    assert abs(metrics["ppo_kl"]) > 1e-3 or metrics["ppo_clip_ratio"] > 0.01


def test_the_saved_model_keeps_its_own_dropout_rates(ranks, dropping, tmp_path):
    ranks(1).call(first_step, dropping, ActorConfig.of("ppo"), tmp_path / "model")
    rates = dict(dropout_rates(AutoConfig.from_pretrained(dropping)))
    assert rates
    assert dict(dropout_rates(AutoConfig.from_pretrained(tmp_path / "model"))) == rates


def test_rates_of_inner_configurations_are_found_and_put_back():
    class Outer(PretrainedConfig):
        model_type = "outer"

    outer = Outer(hidden_dropout=0.2, router_jitter_noise=0.1, text=GPT2Config(attn_pdrop=0.3, resid_pdrop=0.0))
    rates = switch_off_dropout(outer)
    assert rates["text.attn_pdrop"] == 0.3 and rates["hidden_dropout"] == 0.2 and rates["router_jitter_noise"] == 0.1
    assert "text.resid_pdrop" not in rates
    assert not dict(dropout_rates(outer))
    set_dropout(outer, rates)
    assert dict(dropout_rates(outer)) == rates


def test_only_imitation_keeps_dropout_by_default():
    assert [
        section.disable_dropout for section in (Run.of("ppo").actor, Run.of("ppo").critic, Run.of("dpo").actor)
    ] == [True] * 3
    assert [section.disable_dropout for section in (Run.of("sft").actor, Run.of("distill").actor)] == [False] * 2
