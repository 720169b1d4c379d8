"""What the first rows of files say against the flags is found before anything starts, in every task alike."""

from __future__ import annotations

import json
import shlex

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.preflight.inspections.inspect_runs import inspect
from rlhf_suite.preflight.jobs import preflight

MODEL = "actor.model_name_or_path=builtin:tiny"
TEACHER = "teacher.model_name_or_path=builtin:tiny"
TEXT = {"input": "2+2", "output": "4", "label": 1, "prompt": "2+2", "chosen": "4", "rejected": "5"}
CHAT = [{"role": "user", "content": "2+2"}]
WHOLE = [*CHAT, {"role": "assistant", "content": "4"}]


def problems(line, *jobs):
    """What is said about a command line before it runs: flag, what and fix."""
    found = preflight(parse(shlex.split(line)))
    return [(each.key, f"{each.what}; {each.fix}") for each in (found.problems or inspect(found.runs))]


def file_of(folder, name="rows.jsonl", **columns):
    (folder / name).write_text(json.dumps(TEXT | columns) + "\n")
    return folder / name


@pytest.mark.notices(
    "an answer that no flag names is found early in sft alone",
    "preflight/inspections/rows.py",
    "if run.task not in WITH_ANSWERS or",
    "if run.task != 'sft' or",
)
@pytest.mark.parametrize("task", ["sft", f"distill {TEACHER}", "kto data.output_key=null"])
@pytest.mark.parametrize("sweep", ["", "-m train.seed=1,2,3,4,5,6 "])
def test_an_answer_that_no_flag_names_is_found_before_the_run(task, sweep, tmp_path):
    line = f"{sweep}task={task} {MODEL} data.dataset={file_of(tmp_path)}"
    ((key, said),) = problems(line)
    assert key == "data.output_key" and "add data.output_key=<one of input, output, label" in said
    assert problems(line.replace(" data.output_key=null", "") + " data.output_key=output") == []


def test_an_answer_may_be_a_turn_and_a_text_may_have_none(tmp_path):
    line = f"task=sft {MODEL} data.dataset={file_of(tmp_path, input=WHOLE)}"
    assert problems(f"{line} data.apply_chat_template=true") == []
    assert problems(f'{line} \'data.turn_markers=["Q:","A:"]\' data.input_key=prompt') == []
    assert problems(f"{line} actor.pretrain_mode_enable=true data.input_key=prompt") == []
    ((key, said),) = problems(f"{line} data.apply_chat_template=true data.input_key=prompt")
    assert key == "data.output_key" and "'prompt'" in said and "is text, not messages" in said
    (csv := tmp_path / "rows.csv").write_text("input,output\na,b\n")
    ((key, said),) = problems(f"task=sft {MODEL} data.dataset={csv} data.apply_chat_template=true")
    assert key == "data.output_key" and "<one of input, output>" in said


@pytest.mark.notices(
    "messages without a chat template are found when rows are encoded",
    "preflight/inspections/rows.py",
    "isinstance(value, list) and bool(value) and isinstance(value[0], dict)",
    "isinstance(value, dict)",
)
@pytest.mark.parametrize(
    ("task", "column"),
    [
        ("sft data.output_key=output data.dataset={}", "input"),
        (f"distill {TEACHER} data.output_key=output data.dataset={{}}", "input"),
        ("kto data.dataset={}", "input"),
        ("kto data.prompt_key=prompt data.chosen_key=chosen data.rejected_key=rejected data.dataset={}", "chosen"),
        ("rm data.prompt_key=prompt data.dataset={}", "prompt"),
        ("dpo data.prompt_key=prompt data.dataset={}", "rejected"),
        ("ppo reward.rule=exact_match data.label_key=label data.prompt_dataset={}", "input"),
        ("generate data.prompt_dataset={}", "input"),
        ("rejection_sampling reward.rule=exact_match data.label_key=label data.prompt_dataset={}", "input"),
    ],
)
def test_messages_that_no_template_renders_are_found_before_the_run(task, column, tmp_path):
    line = f"task={task.format(tmp_path / 'rows.jsonl')} {MODEL}"
    file_of(tmp_path)
    assert problems(line) == []
    file_of(tmp_path, **{column: CHAT})
    ((key, said),) = problems(line)
    assert key == "data.apply_chat_template" and f"column {column!r} of {tmp_path}/rows.jsonl" in said


@pytest.mark.parametrize(
    "task",
    [
        "sft data.output_key=output data.dataset={}",
        "ppo reward.rule=exact_match data.label_key=label data.prompt_dataset={}",
        "rejection_sampling reward.rule=exact_match data.label_key=label data.prompt_dataset={}",
    ],
)
def test_messages_of_an_evaluation_set_are_found_before_the_run(task, tmp_path):
    line = f"task={task.format(file_of(tmp_path))} {MODEL} eval.dataset={tmp_path}/held.jsonl"
    file_of(tmp_path, "held.jsonl", chat=CHAT)
    assert problems(line) == []
    other = "eval.input_key=chat" if task.startswith("rej") else "'eval.input_key=[chat]'"
    ((key, said),) = problems(f"{line} {other}")
    assert key == "data.apply_chat_template" and "column 'chat' of" in said and "held.jsonl (eval.dataset)" in said
    assert "eval.input_key=<column>" in said


@pytest.mark.notices(
    "a best metric may be that of any set",
    "config/rules/training.py",
    'prefix not in ("eval", *sets):',
    'not prefix.startswith("eval"):',
)
def test_a_metric_of_an_evaluation_set_that_is_not_there_is_refused(tmp_path):
    file_of(tmp_path), file_of(tmp_path, "held.jsonl"), file_of(tmp_path, "other.jsonl")
    line = f"task=sft {MODEL} data.dataset={tmp_path}/rows.jsonl data.output_key=output "
    line += f"'eval.dataset=\"{tmp_path}/held.jsonl,{tmp_path}/other.jsonl\"' ckpt.best_metric_key="
    assert problems(f"{line}eval/held/gpt_loss") == problems(f"{line}eval/gpt_loss") == []
    ((key, said),) = problems(f"{line}eval/helt/gpt_loss")
    assert key == "ckpt.best_metric_key"
    assert "there is no evaluation set eval/helt; there are eval/held, eval/other" in said
    assert "did you mean" in said and "eval/held/gpt_loss" in said


def test_an_evaluation_set_that_is_named_twice_would_be_measured_once(tmp_path):
    file = file_of(tmp_path)
    line = f"task=sft {MODEL} data.dataset={file} data.output_key=output 'eval.dataset=\"{file},{file}\"'"
    ((key, said),) = problems(line)
    assert key == "eval.dataset" and "twice" in said
