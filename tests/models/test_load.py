"""Loading: tokenizers that are safe to save, new heads with small weights, and mistakes that are named."""

from __future__ import annotations

import pytest
import torch
from copies import copy_of, edit
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.models.load import choose_padding_token, load_model, load_tokenizer
from rlhf_suite.models.prepare import make_trainable

FP32 = DeepSpeedConfig.of("sft", param_dtype="fp32")


def test_weights_load_in_the_configured_precision(folder):
    path = str(folder())
    assert load_model(path, head="lm", ds=FP32).model.dtype == torch.float32
    assert load_model(path, head="lm", ds=DeepSpeedConfig.of("sft")).model.dtype == torch.bfloat16


def test_a_loaded_model_is_in_evaluation_mode_and_make_trainable_changes_that(folder):
    model = load_model(str(folder()), head="lm", ds=FP32)
    assert not model.training and not model.model.training
    make_trainable(model, TrainedModelConfig.of("ppo"), LoRAConfig())
    assert model.model.training


def test_tied_weights_stay_one_parameter(folder):
    tied = load_model(str(folder(tied=True)), head="lm", ds=FP32).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = load_model(str(folder(tied=False)), head="lm", ds=FP32).model
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_a_new_value_head_is_small_and_seeded(folder):
    first = load_model(str(folder()), head="value", ds=FP32, seed=1)
    again = load_model(str(folder()), head="value", ds=FP32, seed=1)
    other = load_model(str(folder()), head="value", ds=FP32, seed=2)
    weight = first.model.score.weight
    assert first.head_is_new and weight.shape == (1, 64)
    assert weight.std().item() == pytest.approx(1 / 65, rel=0.3)
    assert torch.equal(weight, again.model.score.weight) and not torch.equal(weight, other.model.score.weight)


def test_a_checkpoint_that_lacks_tensors_is_refused(folder, tmp_path):
    path = copy_of(folder(), tmp_path / "broken")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model.layers.1.mlp.up_proj.weight. Give a complete lm"):
        load_model(str(path), head="lm", ds=FP32)


def test_a_truncated_file_is_refused(folder, tmp_path):
    path = copy_of(folder(), tmp_path / "broken")
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(str(path), head="lm", ds=FP32)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", r"critic.model_name_or_path=/no/such/folder: there is no such folder. Give"),
        ("builtin:huge", r"critic.model_name_or_path=builtin:huge: there is no such model. Write builtin:tiny"),
        ("no-such-owner/no-such-model", r"critic.model_name_or_path=no-such-owner/no-such-model: cannot be loaded"),
    ],
)
def test_a_model_that_is_not_there_names_flag_and_remedy(path, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        load_model(path, head="value", ds=FP32, flag="critic.model_name_or_path")


def test_a_folder_without_a_model_says_what_it_is(tmp_path):
    with pytest.raises(UserError, match=r"has no config.json"):
        load_model(str(tmp_path), head="lm", ds=FP32)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is a LoRA adapter"):
        load_model(str(tmp_path), head="lm", ds=FP32)


def test_heads_whose_settings_mean_nothing_known_are_refused(folder, tmp_path):
    path = copy_of(folder(), tmp_path / "capped")
    edit(path / "config.json", final_logit_softcapping=30.0)
    with pytest.raises(UserError, match=r"final_logit_softcapping \(30.0\)"):
        load_model(str(path), head="lm", ds=FP32)


def test_a_dense_model_has_no_router_to_balance(load):
    with pytest.raises(UserError, match="no experts"):
        make_trainable(load(), TrainedModelConfig.of("ppo", aux_loss_coef=1.0), LoRAConfig())


def test_padding_is_never_the_token_that_ends_a_sequence(folder, tmp_path):
    path = copy_of(folder(), tmp_path / "model")
    eos = AutoTokenizer.from_pretrained(path).eos_token
    edit(path / "tokenizer_config.json", pad_token=eos)
    tokenizer = load_tokenizer(str(path), DataConfig.of("sft"))
    assert tokenizer.pad_token == "<|pad|>" and tokenizer.pad_token_id != tokenizer.eos_token_id


def test_padding_falls_back_to_the_first_token_of_a_text():
    tokenizer = byte_tokenizer()
    assert choose_padding_token(tokenizer) == "<|pad|>"
    tokenizer.eos_token = "<|pad|>"
    assert choose_padding_token(tokenizer) == tokenizer.bos_token


def test_the_chat_template_comes_from_text_or_a_file(folder, tmp_path):
    text = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(text)
    for value in (text, str(file)):
        tokenizer = load_tokenizer(str(folder()), DataConfig.of("sft", tokenizer_chat_template=value))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"
