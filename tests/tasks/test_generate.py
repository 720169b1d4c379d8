"""task=generate before its engines start."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.row import DataError
from rlhf_suite.data.row_range import prompt_rows
from rlhf_suite.data.text_encoders import PromptEncoder
from rlhf_suite.errors import UserError
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.tasks.generate import check_usable


def search(tmp_path, lines, **flags):
    """Look for a prompt in rows of JSON; returns how many chunks are left unread."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines))
    data = DataConfig.of("generate", prompt_dataset=str(file), max_len=16, **flags)
    source = prompt_rows(data)
    chunks = source.chunks(source.part(0, 1), 1)
    check_usable(PromptEncoder(load_tokenizer("builtin:tiny", data), data), chunks, data.on_bad_row)
    return len([*chunks])


LONG, GOOD = '{"input": "%s"}' % ("x" * 99), '{"input": "a"}'


def test_rows_that_are_all_unusable_are_refused_with_their_reasons(tmp_path):
    with pytest.raises(UserError, match=r"none of the rows can be used as a prompt\. .*not JSON"):
        search(tmp_path, [LONG, "{", '{"other": 1}'])


def test_the_first_usable_row_ends_the_search(tmp_path):
    assert search(tmp_path, [LONG, GOOD, LONG, GOOD]) == 2


def test_a_bad_row_ends_the_run_where_it_is_to(tmp_path):
    with pytest.raises((UserError, DataError), match=r"rows\.jsonl:1"):
        search(tmp_path, ["{", GOOD], on_bad_row="stop")
