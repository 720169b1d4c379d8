"""An adapter merged into its base is the model with the adapter; an adapter that does not fit is refused."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import LoRAConfig, load_settings
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import Shape, create
from rlhf_suite.models.forward import sequence_scores, token_log_probs
from rlhf_suite.models.load import load_model, load_tokenizer
from rlhf_suite.models.merge import WEIGHTS, merge_lora, read_adapter
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.models.save import save_adapter, save_hf

CLOSE = {"atol": 5e-6, "rtol": 1e-5}
IDS = torch.tensor([[72, 101, 108, 108, 111, 7, 200]])


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(str(folder()), DataConfig.of("sft"))


@torch.no_grad()
def noisy(model):
    """Every trained weight moved: a fresh adapter is 0."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def adapted(load, tokenizer, tmp_path):
    """A trained model with adapters; its base and its adapter are in `base` and `adapter`."""

    def make(family="qwen3", tied=True, head="lm"):
        model = load(family, tied, head)
        save_hf(model, tokenizer, tmp_path / "base")
        make_trainable(model, TrainedModelConfig.of("ppo"), LoRAConfig(rank=4))
        save_adapter(noisy(model), tokenizer, tmp_path / "adapter")
        return model.eval()

    return make


def merge(folder, dtype=None, base="base", adapter="adapter", said=None):
    """Merge, without any warning of the libraries; what the suite says of it goes to `said`."""
    output, said = folder / "merged", [] if said is None else said
    read = read_adapter(str(folder / adapter))
    shutil.rmtree(output, ignore_errors=True)  # a merge never replaces a folder
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(tied|tie_word_embeddings)")
        count, lacking = merge_lora(str(folder / base), read, output, dtype, said.append)
    assert lacking == []
    return output, count


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False), ("qwen3_moe", False)])
def test_the_merged_model_is_the_adapted_one(load, adapted, batch, tmp_path, family, tied):
    model = adapted(family, tied)
    path, count = merge(tmp_path)
    assert count == 2 * 7
    torch.testing.assert_close(
        token_log_probs(load(path=path), batch).log_probs, token_log_probs(model, batch).log_probs, **CLOSE
    )
    assert load_file(path / "model.safetensors").keys() == load_file(tmp_path / "base/model.safetensors").keys()
    assert AutoConfig.from_pretrained(path).tie_word_embeddings == tied
    assert json.loads((path / "config.json").read_text()) == json.loads((tmp_path / "base/config.json").read_text())


def test_the_merged_reward_model_has_the_trained_head(load, adapted, batch, tmp_path):
    model = adapted(head="value")
    edit(tmp_path / "base/config.json", reward_mean=1.0, reward_std=2.0)
    path, _ = merge(tmp_path)
    expected = sequence_scores(model, batch)
    torch.testing.assert_close(sequence_scores(load(head="value", path=path), batch), expected, **CLOSE)
    plain = AutoModelForSequenceClassification.from_pretrained(path)
    ids = batch.ids[: batch.lengths[0]]
    torch.testing.assert_close(plain(input_ids=ids[None]).logits[0, 0], expected[0], **CLOSE)
    assert plain.config.pad_token_id is not None and not hasattr(plain.config, "reward_mean")


@pytest.mark.notices(
    "a model whose embedding and head were untied is exported as a tied one",
    "models/save.py",
    "            set_tied(config, False)\n",
    "            set_tied(config, True)\n",
)
@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "use_rslora": True},
        {"target_modules": ["down_proj"], "use_dora": True},
    ],
    ids=str,
)
def test_any_adapter_of_peft_and_tied_embeddings_only_one_of_which_it_changes(adapted, tmp_path, settings):
    adapted()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wrapped = noisy(get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **settings)))
    wrapped.save_pretrained(tmp_path / "other")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = PeftModel.from_pretrained(fresh, tmp_path / "other")(input_ids=IDS).logits
    said = []
    path, _ = merge(tmp_path, adapter="other", said=said)
    assert any("a matrix for each" in line for line in said) == ("down_proj" not in settings["target_modules"])
    found, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(found(input_ids=IDS).logits, expected, atol=2e-5, rtol=1e-5)
    assert found.config.tie_word_embeddings == ("down_proj" in settings["target_modules"])


def test_bf16_is_rounded_once(adapted, tmp_path):
    adapted()
    exact = load_file(merge(tmp_path)[0] / "model.safetensors")
    path, _ = merge(tmp_path, dtype="bf16")
    assert AutoConfig.from_pretrained(path).dtype == torch.bfloat16
    rounded = load_file(path / "model.safetensors")
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in exact.items())


@pytest.mark.notices(
    "an adapter for a deeper model is merged into a part of it",
    "models/merge.py",
    "if surplus := sorted(adapter.weights.keys() - expected.keys() - wrapped.state_dict().keys()):",
    "if surplus := sorted(adapter.weights.keys() - adapter.weights.keys()):",
)
@pytest.mark.notices(
    "an adapter for the first layers of another model is merged",
    "models/merge.py",
    "and max(adapted) + 1 < layers:",
    "and max(adapted) + 1 > layers:",
)
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(layers=1), "the model has no place for"),
        (Shape(layers=3), "the model has 3 layers, the adapter is for 2"),
        (Shape(hidden=128), "size mismatch"),
    ],
    ids=str,
)
def test_another_base_is_refused_and_nothing_is_written(adapted, tmp_path, shape, reason):
    adapted()
    create(tmp_path / "other", shape)
    with pytest.raises(UserError, match=rf"does not fit actor.model_name_or_path=.*{reason}"):
        merge(tmp_path, base="other")
    assert not (tmp_path / "merged").exists()


@pytest.mark.notices(
    "an adapter with NaN is merged", "models/merge.py", "if not tensor.isfinite().all():", "if not tensor.numel():"
)
def test_an_adapter_with_a_broken_weight_is_refused(adapted, tmp_path):
    adapted()
    weights = load_file(tmp_path / "adapter" / WEIGHTS)
    next(iter(weights.values())).fill_(torch.nan)
    save_file(weights, tmp_path / "adapter" / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match="NaN"):
        merge(tmp_path)
    (tmp_path / "adapter" / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"no {WEIGHTS}"):
        merge(tmp_path)


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.notices(
    "the base of an adapter is loaded as a model that reads no images",
    "models/merge.py",
    'auto_class("value" if adapter.is_scalar else "lm", sees, config)',
    'auto_class("value" if adapter.is_scalar else "lm", False, config)',
)
@torch.no_grad()
def test_an_adapter_of_a_model_that_reads_images_is_merged(tmp_path):
    """The merged folder has the image processor too."""
    ds, path = load_settings(param_dtype="fp32"), "builtin:vision"
    model = load_model(path, head="lm", ds=ds)
    tokenizer = load_tokenizer(path, DataConfig.of("ppo"))
    make_trainable(model, TrainedModelConfig.of("ppo"), LoRAConfig(rank=4))
    save_adapter(noisy(model), tokenizer, tmp_path / "adapter")
    merge_lora(path, read_adapter(str(tmp_path / "adapter")), tmp_path / "merged", None, lambda line: None)
    again = load_model(str(tmp_path / "merged"), head="lm", ds=ds)
    batch = TokenBatch(IDS[0], torch.tensor([IDS.shape[1]]), torch.ones(IDS.shape[1]))
    ours, merged = (token_log_probs(each.eval(), batch).log_probs for each in (model, again))
    torch.testing.assert_close(merged, ours, **CLOSE)
    assert again.vision is not None and again.vision.is_complete
