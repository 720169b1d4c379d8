"""What a run says at its start about flags that are probably not meant."""

from __future__ import annotations

import json

import pytest

import families
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.launch import TRUSTED
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.sections import section_of
from rlhf_suite.config.plan.run_plan import Machine, resolve
from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.train.notices import batch_notices, chat_template_notices, describe_matrices, describe_rows


def test_a_chat_template_that_is_not_used_is_said():
    tokenizer = byte_tokenizer()
    assert not list(chat_template_notices(tokenizer, DataConfig.of("sft"), "builtin:tiny"))
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    (said,) = chat_template_notices(tokenizer, DataConfig.of("sft"), "models/chat")
    assert "models/chat has a chat template" in said and "add data.apply_chat_template=true" in said
    assert not list(chat_template_notices(tokenizer, DataConfig.of("sft", apply_chat_template=True), "models/chat"))
    tokenizer.chat_template = None
    assert not list(chat_template_notices(tokenizer, DataConfig.of("sft"), "models/base"))


def test_a_batch_that_is_larger_than_the_data_is_said():
    (said,) = batch_notices("rollout.batch_size", 1024, 300, "prompts")
    assert said == "rollout.batch_size=1024 is larger than the data: each step takes all 300 prompts"
    assert not list(batch_notices("rollout.batch_size", 300, 300, "prompts"))


def described(folder, task="sft", **more):
    """Return what a run says of its batches with a model of each given type."""
    flags = dict(more)
    for name in ("actor", "ref") if task == "dpo" else ("actor",):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": flags.pop(name, "llama")}))
        flags[f"{name}.model_name_or_path"] = str(folder / name)
    run = section_of(Run, task, {name.replace("__", "."): value for name, value in flags.items()})
    return [line.replace(f"{folder}/", "") for line in describe_rows(run, resolve(run, Machine("cpu", 0)))]


BUDGET = "micro-batches of at most 4096 tokens"
MANY = "carries a state from token to token, also from one packed sequence into the next"
CHUNKS = "Llama 4 counts the positions of its attention temperature from the start of a row"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, f"llama (Llama): packed rows, varlen attention, {BUDGET}"),
        ({"ds__packing_samples": False}, f"llama (Llama): padded rows, varlen attention, {BUDGET}"),
        ({"train__micro_batch_size": 3}, "(Llama): packed rows, varlen attention, micro-batches of at most 3 rows"),
        (
            {"ds__attn_implementation": "sdpa"},
            "padded rows (sdpa attention lets packed sequences see each other), sdpa",
        ),
        ({"ds__deepcompile": True}, f"(Llama): padded rows (ds.deepcompile=true), varlen attention, {BUDGET}"),
        ({"actor": "llama4_text"}, f"(Llama 4): padded rows ({CHUNKS}), sdpa attention, {BUDGET}"),
        ({"actor": "mamba"}, f"padded rows (mamba {MANY}), varlen attention, {BUDGET}"),
        ({"actor": "qwen3_5_text"}, f"(Qwen3.5): packed rows, varlen attention, {BUDGET}"),
    ],
)
def test_a_run_says_in_one_line_how_its_model_takes_its_batches(tmp_path, flags, said):
    (line,) = described(tmp_path, **flags)
    assert line.startswith("actor.model_name_or_path=actor") and said.removeprefix("llama ") in line


def test_another_model_that_is_padded_is_said_too(tmp_path):
    actor, reference = described(tmp_path, "dpo", ref="llama4_text")
    assert "packed rows" in actor and reference.startswith("ref.model_name_or_path=ref (Llama 4): padded rows")


CODE = """
from transformers import LlamaConfig, PreTrainedModel


class CarryingConfig(LlamaConfig):
    model_type = "carrying"


class CarryingForCausalLM(PreTrainedModel):
    config_class = CarryingConfig
    _is_stateful = {stateful}
"""


@pytest.mark.parametrize("stateful", [True, False])
def test_a_model_whose_own_code_carries_a_state_is_said_to_be_padded(tmp_path, monkeypatch, stateful):
    """Its class alone says so, and loading pads it."""
    monkeypatch.setenv(TRUSTED, "true")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / f"carrying{stateful}"
    folder.mkdir()
    (folder / "carrying.py").write_text(CODE.format(stateful=stateful))
    names = {"AutoConfig": "carrying.CarryingConfig", "AutoModelForCausalLM": "carrying.CarryingForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "carrying", "auto_map": names}))
    flags = {"actor.model_name_or_path": str(folder)}
    run = section_of(Run, "sft", flags)
    (line,) = describe_rows(run, resolve(run, Machine("cpu", 0)))
    assert ("padded rows (carrying carries a state" in line) == stateful and ("packed rows," in line) != stateful
    run = section_of(Run, "sft", flags | {"data.pack_to_max_len": True})
    if stateful:
        with pytest.raises(UserError, match=r"data\.pack_to_max_len=true needs packed rows.*Write data\.pack_to_max"):
            list(describe_rows(run, resolve(run, Machine("cpu", 0))))
    else:
        assert "packed rows" in next(describe_rows(run, resolve(run, Machine("cpu", 0))))


def test_matrices_without_an_adapter_and_those_not_in_4_bits_are_said(tmp_path):
    families.make_typed(tmp_path / "experts", "qwen2_moe")
    families.make_typed(tmp_path / "dense", "qwen2")

    def said(model, **more):
        run = section_of(Run, "sft", {"actor.model_name_or_path": str(tmp_path / model), **more})
        return [*describe_matrices(run, resolve(run, Machine("cpu", 0)))]

    (line,) = said("experts", **{"ds.lora.rank": 2})
    assert line.startswith("ds.lora.target_modules=[all-linear]: of actor.model_name_or_path=")
    assert "have no adapter" in line and "model.layers.*.mlp.experts.down_proj" in line
    assert said("dense", **{"ds.lora.rank": 2}) == said("experts") == []
    assert said("experts", **{"ds.lora.rank": 2, "ds.lora.target_modules": ["q_proj"]}) == []
    adapted = {"ds.lora.rank": 2, "ds.lora.target_modules": ["q_proj"], "ds.load_in_4bit": True}
    (line,) = said("experts", **adapted)
    assert "keep bf16: model.layers.*.mlp.gate, model.layers.*.mlp.experts.gate_up_proj" in line
    assert said("dense", **adapted) == []
