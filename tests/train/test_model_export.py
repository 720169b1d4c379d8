"""The final folder is a model that transformers loads, and it computes what the trained model computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import steps
import torch
from safetensors.torch import load_file
from steps import Setup
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.models.merge import merge_lora, read_adapter
from rlhf_suite.models.save import save_adapter
from rlhf_suite.train.export import export

pytestmark = pytest.mark.stack

CASES = [
    (1, Setup(zero=0)),
    (1, Setup(zero=3)),
    (2, Setup(zero=2)),
    (2, Setup(zero=3)),
    (1, Setup(zero=0, lora=True)),
    (2, Setup(zero=3, lora=True)),
    (1, Setup(zero=2, dtype="bf16")),
]


def train_and_export(world, folder, setup, batch, path):
    """Two steps, then the log-probs of the trained model and its export."""
    model = steps.build(world, folder, setup)
    for step in range(2):
        steps.one_step(model, batch, step, setup)
    with torch.no_grad():
        log_probs = token_log_probs(model, batch).log_probs
    tokenizer = load_tokenizer(str(folder / "plain"), DataConfig.of("sft"))
    export(model, tokenizer, path)
    if setup.lora:
        aside = path.with_name("adapter")
        save_adapter(model.module, tokenizer, aside, gather=model.gather, is_main=world.is_main)
    return log_probs


@pytest.mark.parametrize(("size", "setup"), CASES, ids=str)
def test_transformers_loads_what_was_trained(ranks, folder, batch, tmp_path, size, setup):
    path = tmp_path / "model"
    trained = ranks(size).call(train_and_export, folder, setup, batch, path)[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert model.dtype == (torch.bfloat16 if setup.dtype == "bf16" else torch.float32)
    assert len(AutoTokenizer.from_pretrained(path)) == model.config.vocab_size
    tolerance = {"rtol": 0, "atol": 0.15} if setup.dtype == "bf16" else {"rtol": 1e-4, "atol": 1e-4}
    for row in range(len(batch)):
        part = batch.segments == row
        ids = batch.ids[part]
        with torch.no_grad():
            log_p = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        torch.testing.assert_close(log_p[torch.arange(len(ids) - 1), ids[1:]], trained[part][1:], **tolerance)
    untrained = load_file(folder / "lm" / "model.safetensors")
    saved = load_file(path / "model.safetensors")
    assert saved.keys() == untrained.keys() - {"lm_head.weight"}
    moved = [name for name in saved if not torch.equal(saved[name].float(), untrained[name].float())]
    matrices = [name for name in saved if "proj" in name]
    assert set(matrices) <= set(moved)
    assert set(moved) == (set(matrices) if setup.lora else set(saved)), "LoRA moves what it adapts, and no more"
    if setup.lora:
        adapter = read_adapter(str(tmp_path / "adapter"))
        merge_lora(str(folder / "lm"), adapter, tmp_path / "merged", None, lambda _: None)
        for name, weight in load_file(tmp_path / "merged" / "model.safetensors").items():
            torch.testing.assert_close(weight, saved[name], rtol=1e-5, atol=1e-6)


def test_zero_3_exports_what_zero_0_exports(ranks, folder, batch, tmp_path):
    saved = []
    for size, zero in ((1, 0), (1, 3), (2, 3)):
        path = tmp_path / f"{size}-{zero}"
        ranks(size).call(train_and_export, folder, replace(Setup(), zero=zero, lr=1e-4), batch, path)
        saved.append(load_file(path / "model.safetensors"))
    for other in saved[1:]:
        assert other.keys() == saved[0].keys()
        for name, weight in saved[0].items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=2e-5)
