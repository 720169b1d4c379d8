"""Only teachers with the student's tokens are taken."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.models.load import check_same_vocabulary


def test_a_teacher_with_the_same_tokens_is_taken():
    check_same_vocabulary(byte_tokenizer(), byte_tokenizer(), "teacher")


def test_a_teacher_with_other_tokens_is_refused():
    other: PreTrainedTokenizerFast = byte_tokenizer()
    other.add_tokens(["<think>"])
    with pytest.raises(UserError, match=r"teacher\.model_name_or_path=big: .*'<think>' is \d+ and None.*same family"):
        check_same_vocabulary(byte_tokenizer(), other, "big")
