"""Models that need no download."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_suite.models.builtin import Shape, builtin_folder, byte_tokenizer, create, create_tiny


def test_any_text_encodes_and_comes_back():
    tokenizer = byte_tokenizer()
    for text in ("12+34=46", "  two\n\nlines\t", "naïve 日本語 🙂", "user said assistant", "\x00\x7f"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_and_roles_are_one_token_each_and_distinct():
    tokenizer = byte_tokenizer()
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer(prompt)["input_ids"]) == 10


def test_tiny_is_small_complete_and_the_same_everywhere(tmp_path):
    create_tiny(tmp_path / "a")
    create_tiny(tmp_path / "b")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert sum(tensor.numel() for tensor in first.values()) == 164_800 and "lm_head.weight" not in first
    assert AutoTokenizer.from_pretrained(tmp_path / "a").eos_token == "<|im_end|>"


def test_every_family_loads_in_transformers_without_a_missing_tensor(tmp_path):
    for family in ("qwen3", "lfm2", "llama", "mixtral", "qwen3_moe"):
        create(tmp_path / family, Shape(family=family, tied=False))
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path / family, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_builtin_is_written_once_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = builtin_folder("builtin:tiny", "actor.model_name_or_path")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert builtin_folder("builtin:tiny", "actor.model_name_or_path") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written and tmp_path in folder.parents


def test_making_a_folder_does_not_touch_the_global_random_state(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    create_tiny(tmp_path / "model")
    assert torch.equal(torch.rand(1), expected)


def test_no_token_starts_with_an_empty_embedding(tmp_path):
    create_tiny(tmp_path / "model")
    rows = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"].norm(dim=-1)
    assert rows.min() > 0.1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.pad_token_id == 256
