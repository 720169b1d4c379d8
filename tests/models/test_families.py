"""Each family by its declaration: packed = padded = one sequence at a time by transformers, with gradients."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers.models
from family_errors import adapter_error, alone, batch, language_errors, next_token, score_error

import families
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.adapters import adapted_modules
from rlhf_suite.models.builtin import SHAPES, builtin_folder
from rlhf_suite.models.families import BY_TYPE, PACKED, VARLEN, family_of
from rlhf_suite.models.forward import sequence_scores, token_log_probs
from rlhf_suite.models.load import load_model, load_tokenizer
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.models.save import save_hf

CLOSE = 4e-6  # of log-probs: numbers that are added in another order
# Of gradients. Those of decay rates are small differences of large numbers: by sdpa and by eager attention transformers
# alone has them 4e-5 apart in the tiny Qwen3.5-MoE.
GRADIENTS, DECAYS = 1e-5, 1e-4
ON_GPUS = 2e-2  # kernels of GPUs multiply in tf32; a state that goes on into the next sequence makes more than 1e-1
TYPES = sorted(families.TYPES)
PACKABLE = [kind for kind in TYPES if BY_TYPE[kind].why_not(PACKED) is None]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")

    def folder(kind: str):
        if not (root / kind).exists():
            families.make_typed(root / kind, kind)
        return str(root / kind)

    return folder


def limit(kind: str) -> float:
    return DECAYS if BY_TYPE[kind].mixers else GRADIENTS


def agrees(kind: str, path: str, packed: bool, attention: str | None = None) -> None:
    log_probs, gradients = language_errors(path, packed=packed, attention=attention)
    assert log_probs < CLOSE and gradients < limit(kind), (log_probs, gradients)


@pytest.mark.notices(
    "states of layers go on from one packed sequence to the next",
    "models/forward.py",
    "    if sequences.packed and module.family.mixers:\n",
    "    if False:\n",
    cases="lfm2",
)
@pytest.mark.notices(
    "sequences of one run share a state",
    "models/mixers.py",
    "forward(module, part.unflatten(0, run), *args",
    "forward(module, part[None], *args",
    cases="qwen3_5_text",
)
@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_sequences_are_as_if_each_were_alone(made, kind):
    agrees(kind, made(kind), packed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in PACKABLE if BY_TYPE[kind].mixers or BY_TYPE[kind].scores])
def test_kernels_of_gpus_keep_packed_sequences_apart(made, kind):
    """The layers that carry a state run by the kernels of flash-linear-attention, if they are installed."""
    log_probs, gradients = language_errors(made(kind), packed=True, device="cuda")
    assert log_probs < ON_GPUS and gradients < 2 * ON_GPUS, (log_probs, gradients)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in PACKABLE if BY_TYPE[kind].mixers])
def test_on_a_gpu_no_token_sees_another_sequence(made, kind):
    """But for rounding: an expert multiplies the tokens of all sequences at once, in an order that depends on their
    number."""
    ds = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True)
    model = load_model(made(kind), head="lm", ds=ds).to("cuda")
    plain = batch().to("cuda")
    first = int(plain.lengths[0])
    changed = replace(plain, ids=torch.cat([plain.ids[:first].flip(0) + 1, plain.ids[first:]]) % 256)
    one, other = (token_log_probs(model, each).log_probs for each in (plain, changed))
    torch.testing.assert_close(one[first:], other[first:], atol=ON_GPUS, rtol=0)
    assert (one[:first] - other[:first]).abs().max() > 0.1


@pytest.mark.parametrize("kind", TYPES)
def test_padded_sequences_are_as_if_each_were_alone(made, kind):
    agrees(kind, made(kind), packed=False)


@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_packed_by_default_where_the_family_can_be_packed(made, kind):
    assert load_model(made(kind), head="lm", ds=DeepSpeedConfig.of("sft")).packed == (kind in PACKABLE)


def test_with_an_attention_that_mixes_packed_sequences_rows_are_padded_by_default(made):
    for attention in ("sdpa", "eager"):
        assert not load_model(
            made("llama"), head="lm", ds=DeepSpeedConfig.of("sft", attn_implementation=attention)
        ).packed
    with pytest.raises(UserError, match=r"ds\.packing_samples=true needs"):
        load_model(
            made("llama"), head="lm", ds=DeepSpeedConfig.of("sft", attn_implementation="sdpa", packing_samples=True)
        )


@pytest.mark.notices(
    "a family that cannot be packed is packed by default", "models/families.py", "self.why_not(PACKED) is None and", ""
)
def test_types_whose_state_nothing_resets_are_declared_or_not_packed():
    """Of the installed transformers: a type whose class says that it is stateful."""
    folder = Path(transformers.models.__file__).parent
    files = [file for file in folder.glob("*/modeling_*.py") if "_is_stateful = True" in file.read_text()]
    stateful = {file.parent.name for file in files}
    assert {"mamba", "qwen3_next"} <= stateful
    packed = {kind for kind in stateful if family_of({"model_type": kind}).packs(None, None)}
    assert packed - {kind for kind in packed if BY_TYPE[kind].mixers} == set()


def test_rows_of_every_built_in_model_are_packed():
    for shape in SHAPES:
        folder = builtin_folder(f"builtin:{shape}", "actor.model_name_or_path")
        assert family_of(json.loads((Path(folder) / "config.json").read_text())).packs(None, None)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if BY_TYPE[kind].scores or BY_TYPE[kind].mixers])
def test_the_attention_of_transformers_gives_the_same(made, kind):
    agrees(kind, made(kind), packed=False, attention="eager")


@pytest.mark.parametrize("kind", TYPES)
def test_adapters_of_all_linear_layers_train_and_change_nothing_at_first(made, kind):
    ds = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=kind in PACKABLE)
    model = load_model(made(kind), head="lm", ds=ds)
    make_trainable(model, TrainedModelConfig.of("ppo", gradient_checkpointing_enable=True), LoRAConfig(rank=2))
    log_probs = token_log_probs(model, batch()).log_probs
    torch.testing.assert_close(log_probs.detach(), alone(made(kind))[0], atol=CLOSE, rtol=0)
    next_token(log_probs).backward()
    adapters = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in adapters)
    assert all(grad.abs().sum() > 0 for name, grad in adapters.items() if "lora_B" in name and "expert" not in name)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", TYPES)
def test_the_gradients_of_adapters_are_as_if_each_sequence_were_alone(made, kind, packed):
    if not packed or kind in PACKABLE:
        assert adapter_error(made(kind), packed=packed) < limit(kind)


@pytest.mark.parametrize("kind", TYPES)
def test_packed_and_padded_scores_are_those_of_transformers(made, kind):
    """Also for types of which transformers has no model with a score head."""
    assert score_error(made(kind), packed=False) < limit(kind)
    assert kind not in PACKABLE or score_error(made(kind), packed=True) < limit(kind)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        *((kind, None) for kind in ("qwen2", "gemma2", "gpt_oss", "lfm2")),
        ("glm4", "GLM-4 has gates and values in one matrix"),
        ("llama4_text", "Llama 4 cannot load its experts"),
        ("qwen3_moe", "mlp.experts (Qwen3MoeExperts) is not a linear layer"),
    ],
)
def test_adapters_that_engines_apply_are_those_of_linear_layers_which_vllm_has_too(made, kind, why):
    names, problem = adapted_modules(made(kind), "", DeepSpeedConfig.of("sft", lora=LoRAConfig(rank=2)))
    assert (problem is None) == (why is None) == bool(names) and (why or "") in (problem or "")


def test_declared_layers_and_classes_are_those_of_the_models(made):
    for kind in TYPES:
        model = load_model(made(kind), head="lm", ds=DeepSpeedConfig.of("sft", param_dtype="fp32"))
        assert family_of(model.model.config.to_dict()) == replace(BY_TYPE[kind], images=None), kind
        assert {*BY_TYPE[kind].mixers} <= {type(module).__name__ for module in model.modules()}, kind


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in PACKABLE])
def test_what_a_family_cannot_do_is_refused(made, kind):
    ds = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True, attn_implementation=VARLEN)
    with pytest.raises(UserError, match=f"{BY_TYPE[kind].title}"):
        load_model(made(kind), head="lm", ds=ds)


@pytest.mark.parametrize("kind", TYPES)
def test_a_reward_model_of_each_type_is_saved_and_loaded_again(made, tmp_path, kind):
    ds = DeepSpeedConfig.of("sft", param_dtype="fp32")
    model = load_model(made(kind), head="value", ds=ds)
    save_hf(model, load_tokenizer(made(kind), DataConfig.of("sft")), tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"), head="value", ds=ds)
    assert not again.head_is_new
    tensors = again.state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
    expected = sequence_scores(model, batch()).detach()  # kernels round otherwise at other places in memory
    torch.testing.assert_close(sequence_scores(again, batch()).detach(), expected, atol=1e-6, rtol=1e-5)
