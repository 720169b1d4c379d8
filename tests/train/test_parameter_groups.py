"""Which parameters decay and which are Muon's, in every family of models, and in steps of DeepSpeed."""

from __future__ import annotations

import pytest
import torch
import transformers
from policy_formulas import OBJECTIVES, head_of
from torch import nn

from families import FAMILIES, TYPED, TYPES
from image_families import SHAPES, TEXT
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.models import AdamConfig, MuonConfig, TrainedModelConfig
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.train.optim import muon_groups, parameter_groups
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.strategy import load_trained

EVERY_TYPE = sorted({*TYPES, *FAMILIES, *SHAPES})
DECAY = TrainedModelConfig.of("ppo", adam=AdamConfig(weight_decay=0.1))


def shell(model_type: str) -> transformers.PreTrainedModel:
    """Return a model of a type, with the head of a language model and without numbers."""
    config_of = transformers.CONFIG_MAPPING[model_type]
    with torch.device("meta"):
        if model_type in SHAPES:
            language, tower, more = SHAPES[model_type]
            config = config_of(text_config=TEXT | language, vision_config=tower, **more)
            return transformers.AutoModelForImageTextToText.from_config(config)
        shape = TYPED | TYPES[model_type] if model_type in TYPES else FAMILIES[model_type][1]
        return transformers.AutoModelForCausalLM.from_config(config_of(**shape, vocab_size=320, pad_token_id=0))


def weights_of(model: nn.Module, *kinds: type[nn.Module]) -> set[nn.Parameter]:
    return {module.weight for module in model.modules() if isinstance(module, kinds)}


@pytest.mark.notices(
    "norms and biases decay", "train/optim.py", '"weight_decay": 0.0, ', '"weight_decay": config.adam.weight_decay, '
)
@pytest.mark.notices(
    "only what is named like the norms of Llama is taken for a norm",
    "train/optim.py",
    'return len(whole_shape(parameter)) > 1 and not name.endswith("bias")',
    'return not name.endswith(("bias", "norm.weight"))',
)
@pytest.mark.parametrize("model_type", EVERY_TYPE)
def test_norms_and_biases_do_not_decay(model_type):
    model = shell(model_type)
    decayed, exempt = parameter_groups(model, DECAY)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(exempt["params"]) == len(list(model.parameters()))
    norms = {p for module in model.modules() if "Norm" in type(module).__name__ for p in module.parameters(False)}
    biases = {p for name, p in model.named_parameters() if name.endswith("bias")}
    assert norms and norms | biases <= {*exempt["params"]}
    assert weights_of(model, nn.Linear, nn.Embedding) <= {*decayed["params"]}


@pytest.mark.notices(
    "Muon trains embeddings that are not named so",
    "train/optim.py",
    "if p not in ends and is_matrix(name, p)",
    "if is_matrix(name, p)",
)
@pytest.mark.parametrize("model_type", EVERY_TYPE)
def test_muon_takes_the_hidden_matrices_only(model_type):
    """Neither tokens and positions, nor vectors, nor the biases of experts, which have two axes."""
    model = shell(model_type)
    groups = muon_groups(model, DECAY)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    taken = {p for group in groups if group["use_muon"] for p in group["params"]}
    assert all(p.use_muon is (p in taken) for p in model.parameters())
    ends = weights_of(model, nn.Embedding) | {model.get_output_embeddings().weight}
    assert not taken & ends
    assert {p for p in weights_of(model, nn.Linear) - ends if min(p.shape) > 1} <= taken
    assert all(sum(size > 1 for size in p.shape) > 1 for p in taken)
    assert not any(name.endswith("bias") for name, p in model.named_parameters() if p in taken)


def changes(world, folder, batch, loss, adam, ds):
    """Return how far one step with Muon at 0.1 moves each parameter, by name: the largest change."""
    path, head = str(folder / head_of(loss)), head_of(loss)
    config = TrainedModelConfig.of(
        "ppo",
        **{"model_name_or_path": path, "optim": "muon", "adam": adam, "muon": MuonConfig(lr=0.1)},
        **{"lr_scheduler": "constant", "max_norm": 0.0},
    )
    model = load_trained(ModelPlan("critic", path, head=head), config, ds, world, total_steps=4, seed=0)
    before = {name: weight.clone() for name, weight in weights_on_cpu(model.module, model.gather).items()}
    optimizer_step(model, OBJECTIVES[loss], [batch], 0, "stop")
    after = weights_on_cpu(model.module, model.gather)
    return {name: float((after[name] - weight).abs().max()) for name, weight in before.items()}


ENGINES = [DeepSpeedConfig.of("ppo", zero_stage=zero, param_dtype="fp32", packing_samples=True) for zero in range(4)]


@pytest.mark.notices(
    "DeepSpeed chooses what Muon trains",
    "train/strategy.py",
    "optimizer = optim.muon(module, config)",
    'settings["optimizer"] = {"type": "Muon", "params": {"muon_lr": 0.1, "adam_lr": 0.0, "torch_adam": True}}',
    cases="value",
)
@pytest.mark.stack
@pytest.mark.parametrize("loss", ["next token", "value"])
@pytest.mark.parametrize("ds", ENGINES, ids=lambda ds: f"ZeRO-{ds.zero_stage}")
def test_muon_moves_neither_embeddings_nor_heads_nor_norms(ranks, folder, batch, loss, ds):
    """The rate of AdamW is 0, so what moves is Muon's: seven matrices in each of two layers."""
    (moved,) = ranks(1).call(changes, folder, batch, loss, AdamConfig(lr=0.0), ds)
    assert sum(change > 0 for change in moved.values()) == 2 * 7
    still = {name.rsplit(".", 2)[-2] for name, change in moved.items() if change == 0}
    assert {"embed_tokens", "norm", "q_norm"} | ({"score"} if loss == "value" else set()) <= still


@pytest.mark.stack
@pytest.mark.parametrize("ds", ENGINES, ids=lambda ds: f"ZeRO-{ds.zero_stage}")
def test_norms_do_not_decay_beside_muon(ranks, folder, batch, ds):
    """AdamW's first step moves a number by its rate, and decay would take half of it: 1e-3 x 500."""
    (moved,) = ranks(1).call(changes, folder, batch, "next token", AdamConfig(lr=1e-3, weight_decay=500.0), ds)
    norms = {name: change for name, change in moved.items() if "norm" in name}
    assert norms and all(change < 1.1e-3 for change in norms.values()), norms
    assert max(change for name, change in moved.items() if "embed_tokens" in name) > 0.01
