"""Saved folders load in transformers and peft and give the same numbers."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.disk import DiskError, write_aside
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import sequence_scores, token_log_probs
from rlhf_suite.models.load import load_model, load_tokenizer
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.models.reward_model import reward_stats
from rlhf_suite.models.save import save_adapter, save_hf
from rlhf_suite.models.weights import INDEX, iterate_weights, weights_on_cpu

CLOSE = {"atol": 2e-6, "rtol": 1e-6}


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(str(folder()), DataConfig.of("sft"))


def transformers_logits(path, ids, cls=AutoModelForCausalLM, **kwargs):
    model, info = cls.from_pretrained(path, output_loading_info=True, attn_implementation="eager", **kwargs)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model(input_ids=ids[None]).logits


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen3", True), ("llama", False), ("mixtral", False), ("qwen3_moe", False)]
)
def test_a_saved_model_is_the_same_in_transformers_and_here(load, batch, tokenizer, tmp_path, family, tied):
    model = load(family, tied)
    save_hf(model, tokenizer, tmp_path / "saved")
    again = load(path=tmp_path / "saved")
    expected = token_log_probs(model, batch).log_probs
    torch.testing.assert_close(token_log_probs(again, batch).log_probs, expected, atol=0, rtol=0)
    ids = batch.ids[batch.starts[1] : batch.starts[1] + 70]
    log_p = transformers_logits(tmp_path / "saved", ids)[0, :-1].log_softmax(-1)
    found = log_p.gather(-1, ids[1:, None]).squeeze(-1)
    torch.testing.assert_close(found, expected[batch.starts[1] + 1 : batch.starts[1] + 70], **CLOSE)


def test_a_tied_head_is_stored_once(load, tokenizer, tmp_path):
    save_hf(load(tied=True), tokenizer, tmp_path / "tied")
    save_hf(load(tied=False), tokenizer, tmp_path / "untied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    assert "lm_head.weight" in load_file(tmp_path / "untied" / "model.safetensors")


def test_the_configuration_stays_what_it_was(load, folder, tokenizer, tmp_path):
    save_hf(load(), tokenizer, tmp_path / "saved")
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder(), tmp_path / "saved"))
    assert after == before
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["eos_token_id"] == 258


def test_the_tokenizers_end_joins_the_models_own(load, tokenizer, tmp_path):
    model = load()
    model.model.generation_config.eos_token_id = 7
    save_hf(model, tokenizer, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["eos_token_id"] == [7, 258]


def test_the_precision_is_kept(folder, tokenizer, tmp_path):
    save_hf(load_model(str(folder()), head="lm", ds=DeepSpeedConfig.of("sft")), tokenizer, tmp_path / "half")
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_reward_model_scores_the_same_as_a_sequence_classifier(load, batch, tokenizer, tmp_path):
    model = load(head="value")
    save_hf(model, tokenizer, tmp_path / "saved", extras=lambda: {"reward_mean": 0.25, "reward_std": 2.0})
    ids = batch.ids[: batch.lengths[0]]
    found = transformers_logits(tmp_path / "saved", ids, AutoModelForSequenceClassification)[0, 0]
    torch.testing.assert_close(found, sequence_scores(model, batch)[0], **CLOSE)
    again = load(path=tmp_path / "saved", head="value")
    assert not again.head_is_new and reward_stats(again.model.config) == (0.25, 2.0)
    assert reward_stats(model.model.config) is None
    torch.testing.assert_close(sequence_scores(again, batch), sequence_scores(model, batch), **CLOSE)


def test_a_padding_token_that_ends_sequences_is_not_saved(load, batch, tokenizer, tmp_path):
    model = load(head="value")
    model.model.config.pad_token_id = tokenizer.eos_token_id
    save_hf(model, tokenizer, tmp_path / "saved")
    ids = torch.cat([batch.ids[:4], torch.tensor([tokenizer.eos_token_id])])
    found = transformers_logits(tmp_path / "saved", ids, AutoModelForSequenceClassification)[0]
    torch.testing.assert_close(
        found, sequence_scores(model, TokenBatch(ids, torch.tensor([5]), torch.ones(5))), **CLOSE
    )


def test_a_head_of_another_name_is_saved_and_found_under_it(load, batch, folder, tokenizer, tmp_path):
    ds = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True, value_head_prefix="value_head")
    model = load_model(str(folder()), head="value", ds=ds)
    save_hf(model, tokenizer, tmp_path / "saved")
    assert "value_head.weight" in load_file(tmp_path / "saved" / "model.safetensors")
    again = load_model(str(tmp_path / "saved"), head="value", ds=ds)
    assert not again.head_is_new
    torch.testing.assert_close(sequence_scores(again, batch), sequence_scores(model, batch), **CLOSE)
    save_hf(again, tokenizer, tmp_path / "twice")
    assert "value_head.weight" in load_file(tmp_path / "twice" / "model.safetensors")
    assert load(path=tmp_path / "twice", head="value").head_is_new, "the default name is score"


def trained_adapter(model, rank: int = 4):
    """Adapters as after training: B is no longer zero."""
    make_trainable(model, TrainedModelConfig.of("ppo"), LoRAConfig(rank=rank, alpha=8), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def test_a_new_adapter_changes_nothing_and_only_it_is_trained(load, batch):
    model = load()
    before = token_log_probs(model, batch).log_probs
    make_trainable(model, TrainedModelConfig.of("ppo"), LoRAConfig(rank=4), seed=1)
    torch.testing.assert_close(token_log_probs(model, batch).log_probs, before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)


@pytest.mark.notices(
    "adapters are not merged into the weights that leave the trainer",
    "models/weights.py",
    "        merged = merge_tensors(self.adapter, exact)\n",
    "        merged = dict(list_stored(base_of(self.adapter)))\n",
)
def test_merged_weights_compute_what_the_adapter_computes(load, batch, tokenizer, tmp_path):
    model = trained_adapter(load())
    expected = token_log_probs(model, batch).log_probs
    base = model.model.get_submodule("model.layers.0.self_attn.q_proj.base_layer").weight.clone()
    save_hf(model, tokenizer, tmp_path / "merged")
    torch.testing.assert_close(token_log_probs(load(path=tmp_path / "merged"), batch).log_probs, expected, **CLOSE)
    assert torch.equal(base, model.model.get_submodule("model.layers.0.self_attn.q_proj.base_layer").weight)
    assert (token_log_probs(load(), batch).log_probs - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_adapters_of_experts_and_routers_are_merged_into_the_folder(load, batch, tokenizer, tmp_path, family):
    model = trained_adapter(load(family, tied=False))
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("experts" in name for name in adapted) and any("gate.lora" in name for name in adapted)
    save_hf(model, tokenizer, tmp_path / "merged")
    expected = token_log_probs(model, batch).log_probs
    torch.testing.assert_close(token_log_probs(load(path=tmp_path / "merged"), batch).log_probs, expected, **CLOSE)
    with pytest.raises(UserError, match=r"Set ds.lora.dropout=0"):
        make_trainable(load(family, tied=False), TrainedModelConfig.of("ppo"), LoRAConfig(rank=2, dropout=0.1))


def test_a_saved_adapter_loads_in_peft(load, batch, tokenizer, tmp_path):
    base = load()
    save_hf(base, tokenizer, tmp_path / "base")
    model = trained_adapter(load())
    save_adapter(model, tokenizer, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    ids = batch.ids[batch.starts[1] : batch.starts[1] + 70]
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    log_p = PeftModel.from_pretrained(hf, tmp_path / "adapter")(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    expected = token_log_probs(model, batch).log_probs[batch.starts[1] + 1 : batch.starts[1] + 70]
    torch.testing.assert_close(log_p.gather(-1, ids[1:, None]).squeeze(-1), expected, **CLOSE)


def test_the_head_of_a_reward_model_trains_and_is_saved_with_its_adapter(load, batch, tokenizer, tmp_path):
    base = load(head="value")
    save_hf(base, tokenizer, tmp_path / "base")
    model = trained_adapter(load(head="value"))
    assert model.model.score.weight.requires_grad
    with torch.no_grad():
        model.model.score.weight.add_(1.0)
    save_adapter(model, tokenizer, tmp_path / "adapter")
    hf = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", attn_implementation="eager")
    found = PeftModel.from_pretrained(hf, tmp_path / "adapter")(input_ids=batch.ids[None, : batch.lengths[0]]).logits
    torch.testing.assert_close(found[0, 0], sequence_scores(model, batch)[0], **CLOSE)


@pytest.mark.parametrize("target", ["lm_head", "no_such_layer"])
def test_adapters_for_heads_or_unknown_layers_are_refused(load, target):
    with pytest.raises(UserError, match=r"ds.lora.target_modules"):
        make_trainable(load(), TrainedModelConfig.of("ppo"), LoRAConfig(rank=2, target_modules=[target]))


def test_merging_adds_up_in_fp32(folder):
    model = trained_adapter(load_model(str(folder()), head="lm", ds=DeepSpeedConfig.of("sft")))
    layer = model.model.model.layers[0].mlp.down_proj
    weight, down, up = (part.weight.double() for part in (layer.base_layer, layer.lora_A.default, layer.lora_B.default))
    found = dict(iterate_weights(model))["model.layers.0.mlp.down_proj.weight"]
    assert found.dtype == torch.bfloat16
    exact = weight + layer.scaling["default"] * (up @ down)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-7)  # rounded once, to bf16's 8 bits


def test_weights_are_gathered_a_layer_at_a_time_and_every_parameter_once(load):
    model = load()
    gathered = []

    def gather(parameters):
        gathered.append([id(p) for p in parameters])
        return nullcontext()

    names = [name for name, _ in iterate_weights(model, gather)]
    assert [len(group) for group in gathered] == [1, 11, 11, 1] and len(names) == 24
    assert sorted(chain.from_iterable(gathered)) == sorted(id(p) for p in model.parameters())


def test_experts_have_the_names_of_a_checkpoint(load):
    names = {name for name, _ in iterate_weights(load("mixtral", tied=False))}
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names
    assert not any("gate_up_proj" in name for name in names)


def test_ranks_that_only_take_part_keep_no_copies(load):
    assert weights_on_cpu(load(), keep=False) == {}


def test_copies_are_independent_of_the_model(load):
    model = load()
    weights = weights_on_cpu(model)
    with torch.no_grad():
        model.model.model.norm.weight.zero_()
    assert weights["model.norm.weight"].abs().sum() > 0


def test_a_folder_that_cannot_be_replaced_is_put_back(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_text("old")
    rename = Path.rename

    def failing(self, target):
        if ".new." in self.name:
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="disk full"), write_aside(tmp_path / "model") as folder:
        (folder / "a").write_text("new")
    assert (tmp_path / "model" / "a").read_text() == "old"


def test_a_failed_write_leaves_nothing_and_what_is_there_is_never_replaced(tmp_path):
    with pytest.raises(RuntimeError), write_aside(tmp_path / "model") as folder:
        (folder / "a").write_text("new")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with write_aside(tmp_path / "model") as folder:
        (folder / "a").write_text("old")
    with pytest.raises(DiskError), write_aside(tmp_path / "model") as folder:
        (folder / "a").write_text("new")
    assert (tmp_path / "model" / "a").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_another_process_that_was_first_is_kept_where_both_write_the_same(tmp_path):
    with write_aside(tmp_path / "model", keep=True) as folder:
        (folder / "a").write_text("second")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "a").write_text("first")
    assert (tmp_path / "model" / "a").read_text() == "first"


def test_large_models_are_sharded_with_an_index(load, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_suite.models.weights.SHARD_BYTES", 200_000)
    model = load()
    save_hf(model, tokenizer, tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1 and len(index["weight_map"]) == 24
    assert torch.equal(load(path=tmp_path / "saved").model.model.norm.weight, model.model.model.norm.weight)
