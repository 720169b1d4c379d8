"""Documents as windows: every token but the first is trained on once, whatever the length of a window."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.encode import encode_rows
from rlhf_suite.data.files import TEXT_BYTES
from rlhf_suite.data.row import BadRows, Row, RowError
from rlhf_suite.data.sources import DATASET, locate
from rlhf_suite.data.text_encoders import DocumentEncoder

TEXT = "hello there, user: what is the capital of France?"


def row(text):
    return Row({"text": text}, "set.txt", 1)


def encoder(tokenizer, max_len):
    return DocumentEncoder(tokenizer, DataConfig.of("sft", input_key="text", max_len=max_len))


def test_a_short_document_is_one_window(tokenizer):
    (window,) = encoder(tokenizer, 99).encode(row(TEXT))
    assert window.ids == tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert window.mask == [0] + [1] * (len(window) - 1) and not window.truncated


@pytest.mark.notices(
    "the first token of each window of a document is never trained on",
    "data/text_encoders.py",
    "range(0, len(ids) - 1, length - 1)",
    "range(0, len(ids) - 1, length)",
)
def test_every_window_length_trains_on_every_token_once(tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    for max_len in range(2, len(ids) + 2):
        windows = encoder(tokenizer, max_len).encode(row(TEXT))
        trained = [token for window in windows for token, on in zip(window.ids, window.mask, strict=True) if on]
        assert trained == ids[1:], max_len
        assert [len(window) for window in windows[:-1]] == [max_len] * (len(windows) - 1)
        assert all(one.ids[-1] == other.ids[0] for one, other in pairwise(windows))


def test_a_begin_token_is_kept(bos_tokenizer):
    (window,) = encoder(bos_tokenizer, 99).encode(row("hello there"))
    assert window.ids == bos_tokenizer("hello there")["input_ids"] and window.mask[:2] == [0, 1]


def test_a_document_of_one_token_is_refused(tokenizer):
    with pytest.raises(RowError, match="no token to predict"):
        encoder(tokenizer, 99).encode(row("a"))


def test_the_windows_of_all_rows_follow_each_other(tokenizer):
    windows = list(encode_rows(encoder(tokenizer, 5), [row(TEXT), row(""), row(TEXT)], bad := BadRows("skip")))
    half = windows[: len(windows) // 2]
    assert windows == half + half == half + encoder(tokenizer, 5).encode(row(TEXT)) and bad.count == 1


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone\n\ntwo\n", encoding="utf-8")
    (tmp_path / "b.TXT").write_text("three")
    (tmp_path / "c.txt").write_bytes(b"\xff")
    rows = list(locate(str(tmp_path), "train", DATASET).rows())
    assert [row.values["text"] for row in rows[:2]] == ["one\n\ntwo\n", "three"]
    assert isinstance(rows[2], RowError) and rows[2].reason == "not UTF-8"


def test_a_long_text_file_comes_in_pieces_that_end_with_a_line(tmp_path):
    lines = [f"{number:06d} {'x' * 93}\n" for number in range(25_000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    rows = list(locate(str(tmp_path / "a.txt"), "train", DATASET).rows())
    assert "".join(row.values["text"] for row in rows) == "".join(lines)
    assert [len(row.values["text"]) - TEXT_BYTES in range(101) for row in rows] == [True, True, False]
    assert [row.values["text"][:6] for row in rows] == [f"{row.line - 1:06d}" for row in rows]
