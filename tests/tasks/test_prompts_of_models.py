"""A model is asked as it was trained: its folder says how its prompts looked, through SFT, adapters, merging and RL."""

from __future__ import annotations

import json
import shlex

import pytest

from rlhf_suite.cli import main
from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.data.row import Row
from rlhf_suite.data.text_encoders import ConversationEncoder, PromptEncoder
from rlhf_suite.models.load import load_model, load_tokenizer
from rlhf_suite.models.prompt_format import FILE, PromptFormat, read
from rlhf_suite.models.rehearsal import rehearse
from rlhf_suite.models.save import FolderParts
from rlhf_suite.preflight.jobs import preflight
from small_runs import small_run

pytestmark = pytest.mark.stack

DEFAULT = PromptFormat(False, "User: {}\nAssistant: ")
MODEL = "actor.model_name_or_path"


def checked(line):
    found = preflight(parse(shlex.split(line)))
    assert not found.problems, found.problems
    return found.runs[0]


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """A run of SFT with all defaults: its model, and its adapter."""
    folder = tmp_path_factory.mktemp("sft")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input": f"reverse {n} =", "output": "1"}) + "\n" for n in range(4)))
    line = f"task=sft {MODEL}=builtin:tiny data.dataset={rows} data.output_key=output train.batch_size=4"
    more = "train.micro_batch_size=4 train.max_steps=1 eval.dataset=null ds.lora.rank=2 ckpt.save_adapter=true"
    ranks(1).call(small_run, folder / "run", f"{line} {more}")
    return folder / "run", rows


def test_supervised_training_and_rollouts_with_all_defaults_have_the_same_prompts(trained):
    run, rows = trained
    model, row = run / "model", Row({"input": "reverse 1 =", "output": "1"}, "rows.jsonl", 1)
    assert read(model) == read(run / "model_adapter") == DEFAULT
    sft = checked(f"task=sft {MODEL}=builtin:tiny data.dataset={rows} data.output_key=output")
    rl = checked(f"task=ppo {MODEL}={model} data.prompt_dataset={rows} reward.rule=exact_match data.label_key=output")
    tokenizer = load_tokenizer(str(model), rl.data)
    example = ConversationEncoder(tokenizer, sft.data).encode(row)
    assert PromptEncoder(tokenizer, rl.data).encode(row).ids == example.ids[: example.mask.index(1)]


def test_a_merged_model_has_the_prompts_of_its_adapter(trained, tmp_path):
    run, _ = trained
    words = [f"{MODEL}=builtin:tiny", f"lora.path={run}/model_adapter", f"ckpt.output_dir={tmp_path}/merged"]
    assert main(["task=merge_lora", *words, f"run_dir={tmp_path}/run"]) == 0
    assert read(tmp_path / "merged") == DEFAULT


def test_the_record_is_a_part_of_the_folder_that_is_rehearsed(trained, tmp_path):
    run, _ = trained
    model = load_model(str(run / "model"), head="lm", ds=DeepSpeedConfig.of("sft", param_dtype="fp32"))
    tokenizer = load_tokenizer(str(run / "model"), checked(f"task=chat {MODEL}={run}/model").data)
    parts = FolderParts.of(model, tokenizer, DEFAULT)
    assert rehearse(parts) == []
    assert parts.write(tmp_path) == [] and read(tmp_path) == DEFAULT and (tmp_path / FILE).is_file()


def test_a_run_says_what_it_took_from_the_folder_of_its_model(trained, capsys, monkeypatch):
    run, rows = trained
    monkeypatch.setenv("COLUMNS", "400")
    words = f"task=generate {MODEL}={run}/model data.prompt_dataset={rows} explain=true"
    assert main(shlex.split(words)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"as {run}/model was trained" in shown and f"{FILE} of the model" in shown
