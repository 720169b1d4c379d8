"""An export is tried before anything is trained, and a part that fails later does not cost the weights."""

from __future__ import annotations

import json
import tempfile
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

import families
from families import plain_tokenizer
from full_disk import fill
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.disk import DiskError
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import sequence_scores
from rlhf_suite.models.load import load_model, load_tokenizer
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.models.rehearsal import rehearse
from rlhf_suite.models.save import FolderParts, save_hf

PLAIN = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=False, attn_implementation="eager")
SAMPLING = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}  # as Llama 2 and Vicuna ship them


@pytest.fixture
def exported(tmp_path):
    """Rehearse and export a model; gives its folder and what was said."""

    def run(family: str, head: str = "lm", lora: int = 0, tokenizer=None, generation=None, **settings):
        families.make(tmp_path / "base", family, tokenizer=tokenizer, **settings)
        if generation:
            file = tmp_path / "base" / "generation_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | generation))
        model = load_model(str(tmp_path / "base"), head=head, ds=PLAIN)
        if lora:
            make_trainable(model, TrainedModelConfig.of("ppo"), LoRAConfig(rank=lora))
        own = load_tokenizer(str(tmp_path / "base"), DataConfig.of("sft"))
        said = rehearse(FolderParts.of(model, own))
        assert save_hf(model, own, tmp_path / "saved") == []
        return tmp_path / "saved", said, model

    return run


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_is_rehearsed_and_exported(exported, family, head, lora):
    path, said, _ = exported(family, head, lora)
    assert said == []
    _, info = load_class(head).from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def load_class(head: str):
    return AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification


def test_generation_settings_that_contradict_are_mended_and_said(exported):
    path, said, _ = exported("llama", generation=SAMPLING)
    assert len(said) == 1 and "do_sample=true" in said[0] and "temperature" in said[0]
    found = GenerationConfig.from_pretrained(path)
    assert (found.do_sample, found.temperature, found.top_p) == (True, 0.9, 0.6)
    found.validate(strict=True)


def test_generation_settings_that_mean_nothing_are_left_out(exported):
    path, said, _ = exported("llama", generation=SAMPLING | {"num_beams": 1, "length_penalty": 2.0})
    assert len(said) == 1 and "gets no length_penalty" in said[0]
    found = GenerationConfig.from_pretrained(path)
    assert found.eos_token_id == 258 and found.temperature == 0.9 and found.length_penalty is None


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_padding_token_without_a_row_is_replaced_by_one_that_has_it(exported, head):
    tokenizer = plain_tokenizer("<unk>", "<pad>", unk_token="<unk>", pad_token="<pad>")
    path, _, _ = exported("llama", head, tokenizer=tokenizer, vocab_size=258, pad_token_id=None)
    model, again = load_class(head).from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.pad_token_id == again.pad_token_id == again.convert_tokens_to_ids("<unk>") == 257


def test_a_language_model_without_any_token_to_pad_with_is_saved_without_one(exported):
    path, _, _ = exported("gpt2", tokenizer=plain_tokenizer())
    assert AutoModelForCausalLM.from_pretrained(path).config.pad_token_id is None


@pytest.mark.parametrize(("family", "padding"), [("gpt2", {}), ("gpt_neox", {"pad_token": "<pad>"})])
def test_a_reward_model_gets_a_padding_token_and_scores_padded_rows_as_here(exported, family, padding):
    tokenizer = plain_tokenizer(*padding.values(), **padding)
    path, _, model = exported(family, "value", tokenizer=tokenizer, vocab_size=257, pad_token_id=None)
    again = AutoTokenizer.from_pretrained(path)
    texts = ["short" + again.eos_token, "a longer text" + again.eos_token]
    rows = again(texts, padding=True, return_tensors="pt")
    plain = AutoModelForSequenceClassification.from_pretrained(path)
    assert plain.config.pad_token_id == again.pad_token_id == 257 and plain.config.vocab_size == 258
    found = plain(**rows).logits.squeeze(1)
    ids = [again(text)["input_ids"] for text in texts]
    lengths = torch.tensor([len(each) for each in ids])
    batch = TokenBatch(torch.tensor([*chain(*ids)]), lengths, torch.ones(int(lengths.sum())))
    torch.testing.assert_close(found, sequence_scores(model, batch), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(
        sequence_scores(load_model(str(path), head="value", ds=PLAIN), batch), found, atol=2e-6, rtol=1e-5
    )


class Unsaved(type(plain_tokenizer())):
    """A tokenizer of other people that cannot be saved."""

    def save_pretrained(self, folder):
        raise RuntimeError("no such vocabulary")


def broken(model, folder):
    """The parts of a folder whose tokenizer cannot be written."""
    tokenizer = load_tokenizer(str(folder()), DataConfig.of("sft"))
    tokenizer.__class__ = Unsaved
    return FolderParts.of(model, tokenizer)


def test_a_base_that_could_not_be_saved_is_refused_before_it_is_trained(load, folder):
    with pytest.raises(UserError, match=r"could not be saved and loaded again: the tokenizer .*no such vocabulary"):
        rehearse(broken(load(), folder))


@pytest.mark.notices(
    "the rehearsal of an export compares the number of dimensions alone",
    "models/rehearsal.py",
    "if shape != shapes[name]:",
    "if len(shape) != len(shapes[name]):",
)
def test_a_configuration_of_another_shape_is_refused(load, folder):
    model = load()
    model.model.config.intermediate_size += 1
    parts = FolderParts.of(model, load_tokenizer(str(folder()), DataConfig.of("sft")))
    with pytest.raises(UserError, match=r"mlp.*has the shape .*, and by its configuration"):
        rehearse(parts)


@pytest.mark.notices(
    "the rehearsal of an export does not read its tokenizer again",
    "models/rehearsal.py",
    "            check_tokenizer(parts.tokenizer, place)\n",
    "",
)
def test_a_tokenizer_that_reads_other_tokens_when_it_is_loaded_is_refused(load, folder):
    parts = FolderParts.of(load(), load_tokenizer(str(folder()), DataConfig.of("sft")))
    parts.tokenizer.backend_tokenizer.pre_tokenizer = None
    parts.tokenizer.save_pretrained = plain_tokenizer().save_pretrained
    with pytest.raises(UserError, match="the tokenizer has another"):
        rehearse(parts)


@pytest.mark.notices(
    "a full disk of temporary files is blamed on the model",
    "models/rehearsal.py",
    "(reason := full_reason(error, temporary)) is not None",
    "(reason := full_reason(error, temporary)) == 0",
)
def test_a_full_disk_of_temporary_files_is_not_a_fault_of_the_model(load, folder, small, monkeypatch):
    tokenizer = load_tokenizer(str(folder()), DataConfig.of("sft"))
    parts = FolderParts.of(load(), tokenizer)
    monkeypatch.setattr(tempfile, "tempdir", str(small))
    fill(small)
    with pytest.raises(DiskError, match=rf"^{small} \(TMPDIR\) cannot be written: the disk is full"):
        rehearse(parts)


def test_parts_that_cannot_be_written_do_not_cost_the_weights(load, folder, tmp_path):
    model = load()

    def extras():
        raise ValueError("no scores")

    problems = save_hf(model, broken(model, folder).tokenizer, tmp_path / "saved", extras=extras)
    assert [problem.split(" could")[0] for problem in problems] == [
        "what the task adds to config.json",
        "the tokenizer",
    ]
    assert "no such vocabulary" in problems[1] and "copy its files from" in problems[1]
    assert torch.equal(load(path=tmp_path / "saved").model.model.norm.weight, model.model.model.norm.weight)
    assert load_file(tmp_path / "saved" / "model.safetensors")
