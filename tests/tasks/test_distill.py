"""Only teachers with the student's tokens are taken, and plain text is trained on to its last token."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.teacher import TeacherConfig
from rlhf_suite.data.row import Row
from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.models.load import check_same_vocabulary
from rlhf_suite.tasks.distill import make_task


def test_a_teacher_with_the_same_tokens_is_taken():
    check_same_vocabulary(byte_tokenizer(), byte_tokenizer(), "teacher")


def test_a_teacher_with_other_tokens_is_refused():
    other: PreTrainedTokenizerFast = byte_tokenizer()
    other.add_tokens(["<think>"])
    with pytest.raises(UserError, match=r"teacher\.model_name_or_path=big: .*'<think>' is \d+ and None.*same family"):
        check_same_vocabulary(byte_tokenizer(), other, "big")


@pytest.mark.notices(
    "a student learns what the teacher says of padding rows",
    "tasks/distill.py",
    "logits[:, : self.vocabulary]",
    "logits",
)
@pytest.mark.stack
def test_rows_behind_the_last_token_are_no_part_of_the_distributions():
    """Models have more rows than the tokenizer has tokens: what they say there is padding."""
    run = Run.of(
        "distill",
        teacher=TeacherConfig.of("distill", model_name_or_path="builtin:tiny"),
        data=DataConfig.of("distill", output_key="output"),
    )
    task, tokens = make_task(run, byte_tokenizer()), len(byte_tokenizer())
    logits = torch.zeros(2, tokens + 7)
    logits[:, tokens:] = 50.0
    found = task.log_probs(logits)
    assert found.shape == (2, tokens) and found.exp().sum(-1).tolist() == pytest.approx([1, 1], rel=1e-5)


@pytest.mark.stack
@pytest.mark.parametrize(("pretrains", "trained"), [(True, [7, 7]), (False, [3])])
def test_plain_text_is_distilled_to_its_last_token(pretrains, trained):
    """15 tokens in windows of 8 that share one token; else the answer alone, with its end-of-sequence token."""
    columns = {"input_key": "text", "max_len": 8} if pretrains else {"input_key": "text", "output_key": "answer"}
    run = Run.of(
        "distill",
        actor=ActorConfig.of("distill", pretrain_mode_enable=pretrains),
        teacher=TeacherConfig.of("distill", model_name_or_path="builtin:tiny"),
        data=DataConfig.of("distill", **columns),
    )
    row = Row({"text": "a" * 15, "answer": "bc"}, "rows.jsonl", 1)
    made = make_task(run, byte_tokenizer()).encoder.encode(row)
    assert [sum(each.mask) for each in (made if isinstance(made, list) else [made])] == trained
