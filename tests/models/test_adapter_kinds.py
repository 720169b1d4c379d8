"""Adapters of every kind: what is exported, sent to engines, or written by task=merge_lora computes what peft computes
with the adapter, or the adapter is refused with the reason."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from adapter_kinds import KINDS
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import families
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.load import load_model
from rlhf_suite.models.merge import merge_lora, read_adapter
from rlhf_suite.models.weights import find_changed_ties, iterate_weights

IDS = torch.tensor([[72, 101, 1, 7, 111, 3, 200, 4, 5]])
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
REFUSED = {
    "a bias where the base has none": "base layer has no bias",
    "layers used twice": "the saved weights would lack .*layers.2",
    "activated LoRA": "aLoRA",
}
# Kinds that make two matrices of one: what peft merges into the matrix that embedding and head share is neither.
UNTIES = {
    "the head as a whole", "the embedding as a whole", "both as a whole", "the embedding", "the head",
    "embedding and head", "DoRA of the embedding", "an embedding that is scaled", "the embedding of GPT-2",
    "trained tokens of the head",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def make_adapter(folder, kind: str, tied: bool):
    """A base and an adapter as after training, and the logits of both together in peft."""
    family, settings = KINDS[kind]
    families.make(folder / "base", family, tie_word_embeddings=tied)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return adapted(folder).eval()(input_ids=IDS).logits


def adapted(folder):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter")


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_merged_as_peft_computes_them(tmp_path, kind, tied):
    expected = make_adapter(tmp_path, kind, tied)
    if kind in REFUSED:
        with pytest.raises(UserError, match=REFUSED[kind]):
            merge_lora(str(tmp_path / "base"), read_adapter(str(tmp_path / "adapter")), tmp_path / "m", None, [].append)
        assert not (tmp_path / "m").exists()
        return
    _, lacking = merge_lora(
        str(tmp_path / "base"), read_adapter(str(tmp_path / "adapter")), tmp_path / "merged", None, [].append
    )
    assert not lacking
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected, **CLOSE)
    assert merged.config.tie_word_embeddings == (tied and kind not in UNTIES)
    # peft's own merge adds to a shared matrix in place, so that there one adapter changes both, or both change one.
    if not (tied and kind in UNTIES | {"embedding and head, tied"}):
        own = adapted(tmp_path).merge_and_unload().eval()
        torch.testing.assert_close(own(input_ids=IDS).logits, expected, **CLOSE)
    check_sent(tmp_path, load_file(tmp_path / "merged" / "model.safetensors"), tied and kind in UNTIES)


def check_sent(folder, saved, unties: bool):
    """What a trained model gives to an export and to engines is what was merged."""
    ds = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=False, attn_implementation="eager")
    model = load_model(str(folder / "base"), head="lm", ds=ds)
    PeftModel.from_pretrained(model.model, folder / "adapter")
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    sent = {name: tensor.clone() for name, tensor in iterate_weights(model)}
    assert sent.keys() == saved.keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, saved[name], **CLOSE)
    assert bool(find_changed_ties(model.model)) == unties
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.model.state_dict().items())
    shutil.rmtree(folder)


def test_there_are_more_than_30_kinds():
    assert len(KINDS) - len(REFUSED) > 30
