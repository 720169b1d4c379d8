"""An evaluation set may call its columns otherwise than the training data, in every supervised task."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tasks import dpo, sft
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.train.supervised import encode

COMMON = "actor.model_name_or_path=builtin:tiny data.dataset={train} data.cache_enable=false "
SFT = f"task=sft data.output_key=output {COMMON}"
DPO = f"task=dpo data.prompt_key=prompt data.input_template=null {COMMON}"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(items) -> list[str]:
    return [byte_tokenizer().decode(getattr(item, "examples", [item])[0].ids) for item in items]


@pytest.fixture
def encoded(tmp_path):
    """The data of a command line, with `{train}` and `{folder}` filled in."""

    def make(task, line):
        found = preflight(parse(line.split()))
        assert not found.problems, found.problems
        (run,) = found.runs
        journal = Journal(LoggerConfig(progress=False), RunFolder(tmp_path), run.task)
        return encode(run, task.make_task, task.make_task(run, byte_tokenizer()), journal)

    return make


def test_one_column_for_all_sets_and_one_for_each(encoded, tmp_path):
    train = write(tmp_path / "train.jsonl", {"input": "a", "output": "b"})
    first = write(tmp_path / "first.jsonl", {"question": "c", "answer": "d"})
    second = write(tmp_path / "second.jsonl", {"prompt": "e", "answer": "f"})
    columns = "eval.input_key=[question,prompt] eval.output_key=[answer]"
    data = encoded(sft, SFT.format(train=train) + f'eval.dataset="{first},{second}" {columns}')
    assert texts(data.train) == ["User: a\nAssistant: b<|im_end|>"]
    assert texts(data.held_out["first"]) == ["User: c\nAssistant: d<|im_end|>"]
    assert texts(data.held_out["second"]) == ["User: e\nAssistant: f<|im_end|>"]


def test_columns_of_pairs(encoded, tmp_path):
    train = write(tmp_path / "train.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    held_out = write(tmp_path / "held_out.jsonl", {"question": "d", "better": "e", "rejected": "f"})
    columns = "eval.prompt_key=[question] eval.chosen_key=[better]"
    data = encoded(dpo, DPO.format(train=train) + f"eval.dataset={held_out} {columns}")
    assert texts(data.held_out["held_out"]) == ["de<|im_end|>"]


def test_a_column_that_an_evaluation_set_lacks_is_found_before_anything_starts(tmp_path):
    train = write(tmp_path / "train.jsonl", {"input": "a", "output": "b"})
    held_out = write(tmp_path / "held_out.jsonl", {"question": "c", "output": "d"})
    line = SFT.format(train=train) + f"eval.dataset={held_out} "
    (problem,) = preflight(parse(line.split())).problems
    assert "no column 'input'" in problem.what
    (problem,) = preflight(parse([*line.split(), "eval.input_key=[prompt]"])).problems
    assert problem.key == "eval.input_key" and "no column 'prompt'" in problem.what
    assert not preflight(parse([*line.split(), "eval.input_key=[question]"])).problems
