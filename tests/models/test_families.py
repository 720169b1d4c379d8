"""Each family by its declaration: packed = padded = one sequence at a time by transformers, with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

import families
from rlhf_suite.config.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.models import TrainedModelConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.errors import UserError
from rlhf_suite.models.families import BY_TYPE, PACKED, VARLEN, family_of
from rlhf_suite.models.forward import sequence_outputs, token_log_probs
from rlhf_suite.models.load import load_model
from rlhf_suite.models.prepare import make_trainable

LENGTHS = [5, 40, 1, 9, 9]
# Sums in another order; gradients of routers and of states that decay are small differences of large numbers.
CLOSE, GRADIENTS = 4e-6, 2e-5
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


def batch() -> TokenBatch:
    ids = torch.randint(0, 256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    return TokenBatch(ids, torch.tensor(LENGTHS), torch.ones(len(ids)))


def weighted(log_probs: torch.Tensor) -> torch.Tensor:
    return (log_probs * torch.linspace(0.1, 1, len(log_probs))).sum()


KEPT: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}


def alone(path: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs [T] of each sequence alone by transformers' own eager forward pass, and the gradients of a sum."""
    if path not in KEPT:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        log_probs = []
        for ids in batch().ids.split(LENGTHS):
            log_p = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            log_probs.append(F.pad(log_p.gather(-1, ids[1:, None]).squeeze(-1), (1, 0)))
        weighted(torch.cat(log_probs)).backward()
        KEPT[path] = torch.cat(log_probs).detach(), gradients(model)
    return KEPT[path]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def agrees(path: str, packed: bool, attention: str | None) -> None:
    ds = DeepSpeedConfig(param_dtype="fp32", packing_samples=packed, attn_implementation=attention)
    model = load_model(path, head="lm", ds=ds)
    log_probs = token_log_probs(model, batch()).log_probs
    expected, wanted = alone(path)
    torch.testing.assert_close(log_probs.detach(), expected, atol=CLOSE, rtol=0)
    weighted(log_probs).backward()
    found = gradients(model.model)
    assert found.keys() == wanted.keys()
    errors = {name: float((found[name] - wanted[name]).norm() / (wanted[name].norm() + 1e-3)) for name in wanted}
    assert max(errors.values()) < GRADIENTS, max(errors.items(), key=lambda item: item[1])


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
    agrees(made(kind), packed=True, attention=None)


@pytest.mark.parametrize("kind", TYPES)
def test_by_default_padded_sequences_are_as_if_each_were_alone(made, kind):
    agrees(made(kind), packed=False, attention=None)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if BY_TYPE[kind].scores or BY_TYPE[kind].mixers])
def test_the_attention_of_transformers_gives_the_same(made, kind):
    agrees(made(kind), packed=False, attention="eager")


@pytest.mark.parametrize("kind", TYPES)
def test_adapters_of_all_linear_layers_train_and_change_nothing_at_first(made, kind):
    ds = DeepSpeedConfig(param_dtype="fp32", packing_samples=kind in PACKABLE)
    model = load_model(made(kind), head="lm", ds=ds)
    make_trainable(model, TrainedModelConfig(gradient_checkpointing_enable=True), LoRAConfig(rank=2))
    log_probs = token_log_probs(model, batch()).log_probs
    torch.testing.assert_close(log_probs.detach(), alone(made(kind))[0], atol=CLOSE, rtol=0)
    weighted(log_probs).backward()
    adapters = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in adapters)
    assert all(grad.abs().sum() > 0 for name, grad in adapters.items() if "lora_B" in name and "expert" not in name)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES])
def test_packed_scores_are_those_of_padded_rows(made, kind):
    found = []
    for packed in (True, False):
        model = load_model(made(kind), head="value", ds=DeepSpeedConfig(param_dtype="fp32", packing_samples=packed))
        outputs = sequence_outputs(model, batch()).values
        outputs.sum().backward()
        found.append((outputs.detach(), model.model.get_input_embeddings().weight.grad))
    torch.testing.assert_close(*found, atol=CLOSE, rtol=GRADIENTS)


def test_declared_layers_and_classes_are_those_of_the_models(made):
    for kind in TYPES:
        model = load_model(made(kind), head="lm", ds=DeepSpeedConfig(param_dtype="fp32"))
        assert family_of(model.model.config.to_dict()) is BY_TYPE[kind], kind
        assert {*BY_TYPE[kind].mixers} <= {type(module).__name__ for module in model.modules()}, kind


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in PACKABLE])
def test_what_a_family_cannot_do_is_refused(made, kind):
    ds = DeepSpeedConfig(param_dtype="fp32", packing_samples=True, attn_implementation=VARLEN)
    with pytest.raises(UserError, match=f"{BY_TYPE[kind].title}"):
        load_model(made(kind), head="lm", ds=ds)
