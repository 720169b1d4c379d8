"""A tokenizer with more tokens than its model has embeddings is told before a run, and no text of it trains."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoTokenizer

from rlhf_suite.cli import main
from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.encode import encode_rows
from rlhf_suite.data.render import NUM_EMBEDDINGS, NoEmbedding, tokens
from rlhf_suite.data.row import BadRows, Row
from rlhf_suite.data.text_encoders import ConversationEncoder, DocumentEncoder, PromptEncoder
from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.preflight.inspections.inspect_runs import inspect
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.train.notices import embedding_notices

pytestmark = pytest.mark.stack

WORDS = "data.output_key=output eval.dataset=null train.batch_size=4 train.micro_batch_size=4 train.max_steps=1"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    create_tiny(folder)
    return folder


@pytest.fixture
def more(tiny, tmp_path):
    """A model folder whose tokenizer got tokens that the model did not."""

    def make(*added, **settings):
        folder = tmp_path / "model"
        shutil.copytree(tiny, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(list(added), special_tokens=True)
        for name, value in settings.items():
            setattr(tokenizer, name, value)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def write_rows(folder, *texts):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"input": text, "output": "1"}) + "\n" for text in texts))
    return path


@pytest.mark.notices(
    "a token without an embedding reaches the model",
    "data/render.py",
    "if rows is not None and ids and max(ids) >= rows:",
    "if rows is not None and ids and max(ids) > rows:",
)
def test_texts_with_such_a_token_cannot_be_used_and_others_can(more, tmp_path):
    folder = more("<tool>", "<answer>")
    tokenizer = load_tokenizer(str(folder), DataConfig.of("sft"))
    rows = getattr(tokenizer, NUM_EMBEDDINGS)
    encoders = (
        ConversationEncoder(tokenizer, DataConfig.of("sft", output_key="output")),
        PromptEncoder(tokenizer, DataConfig.of("ppo")),
        DocumentEncoder(tokenizer, DataConfig.of("sft")),
    )
    for encoder in encoders:
        bad = BadRows("skip")
        given = [Row({"input": text, "output": "1"}, "a.jsonl", line) for line, text in enumerate(("ab", "<tool>"), 1)]
        assert len([*encode_rows(encoder, given, bad)]) == 1
        assert bad.first == {f"the model has no embedding for the token '<tool>' ({rows}; it has {rows})": "a.jsonl:2"}
    with pytest.raises(NoEmbedding):
        tokens(tokenizer, "<answer>")
    (said,) = embedding_notices(tokenizer, "x")
    assert f"has embeddings of {rows} tokens, its tokenizer has {rows + 2}: texts with <tool>, <answer> cannot" in said


@pytest.mark.notices(
    "a token that was added to a tokenizer stops every run",
    "preflight/inspections/model_files.py",
    "for token, number in self.vocabulary.items() if token not in added",
    "for token, number in self.vocabulary.items()",
)
def test_a_run_whose_rows_need_them_ends_before_its_first_step(more, tmp_path, capfd):
    folder, rows = more("<tool>"), write_rows(tmp_path, *["<tool> 1"] * 8)
    words = f"task=sft actor.model_name_or_path={folder} data.dataset={rows} run_dir={tmp_path}/run {WORDS}"
    assert main(words.split()) == 2
    said = capfd.readouterr().err
    assert "the model has no embedding for the token '<tool>'" in said and "rows.jsonl:1" in said
    assert "Traceback" not in said and not (tmp_path / "run/metrics.jsonl").exists()


def test_a_padding_token_of_the_tokenizer_alone_needs_no_row(more):
    tokenizer = load_tokenizer(str(more("<pad>", pad_token="<pad>")), DataConfig.of("sft"))
    assert not [*embedding_notices(tokenizer, "x")]


@pytest.mark.notices(
    "a model that lacks the embeddings of common words is loaded",
    "models/load.py",
    "if tokenizer.vocab_size > rows or",
    "if False or",
)
def test_a_model_that_lacks_common_words_or_the_end_is_refused_early_and_late(more, tiny, tmp_path):
    config = json.loads((tiny / "config.json").read_text())
    cut = tmp_path / "cut"
    shutil.copytree(tiny, cut)
    (cut / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    AutoTokenizer.from_pretrained(cut, eos_token="a").save_pretrained(cut)  # a token that has a row
    for folder in (cut, more("<stop>", eos_token="<stop>")):
        with pytest.raises(UserError, match=r"tokens, and the model has embeddings of .*resize_token_embeddings\("):
            load_tokenizer(str(folder), DataConfig.of("sft"))
        line = f"task=sft actor.model_name_or_path={folder} data.dataset=builtin:reverse data.output_key=output"
        found = preflight(parse(line.split()))
        (problem,) = [each for each in inspect(found.runs) if "embeddings" in each.what]
        assert problem.key == "actor.model_name_or_path" and "resize_token_embeddings" in problem.fix
    line = f"task=sft actor.model_name_or_path={tiny} data.dataset=builtin:reverse data.output_key=output"
    assert inspect(preflight(parse(line.split())).runs) == []
    assert not hasattr(load_tokenizer(str(tiny), DataConfig.of("sft")), NUM_EMBEDDINGS)


@pytest.mark.notices(
    "a reference without the embeddings of the actor's words is loaded",
    "preflight/inspections/vocabularies.py",
    "in (REFERENCE, TEACHER, CRITIC)):",
    "in (TEACHER, CRITIC)):",
)
@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("dpo data.dataset=builtin:reverse_pairs data.prompt_key=prompt", "ref"),
        ("distill data.dataset=builtin:reverse data.output_key=output", "teacher"),
        ("ppo data.prompt_dataset=builtin:reverse data.label_key=label reward.rule=exact_match", "ref"),
    ],
)
def test_a_model_that_reads_the_tokens_of_the_actor_has_their_embeddings(task, name, tiny, tmp_path):
    less = tmp_path / "less"
    shutil.copytree(tiny, less)
    config = json.loads((tiny / "config.json").read_text())
    (less / "config.json").write_text(json.dumps(config | {"vocab_size": 250}))
    (less / "tokenizer.json").unlink()
    line = f"task={task} actor.model_name_or_path={tiny} data.max_len=64 {name}.model_name_or_path="
    problems = inspect(preflight(parse([*f"{line}{less}".split()])).runs)
    assert [each.key for each in problems if "250 tokens" in each.what] == [f"{name}.model_name_or_path"]
    assert not [each for each in inspect(preflight(parse(f"{line}{tiny}".split())).runs) if "embeddings" in each.what]
