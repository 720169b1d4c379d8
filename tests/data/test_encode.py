"""Many rows: order kept, bad rows counted with their place, the same result from any number of processes."""

from __future__ import annotations

import os
import pickle

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.encode import encode_rows
from rlhf_suite.data.row import BadRows, DataError, Row, RowError
from rlhf_suite.data.text_encoders import ConversationEncoder
from rlhf_suite.errors import RunError

CONFIG = DataConfig.of("sft", output_key="output", max_len=24)


def make_rows(count):
    """Rows 3, 13, 23 ... have no answer, rows 4, 14 ... one that is too long."""
    answers = {3: "", 4: "word " * 40}
    return [Row({"input": f"n {n}", "output": answers.get(n % 10, str(n))}, "set.jsonl", n) for n in range(count)]


def test_bad_rows_are_skipped_and_truncations_counted(tokenizer):
    bad = BadRows("skip")
    examples = list(encode_rows(ConversationEncoder(tokenizer, CONFIG), make_rows(25), bad))
    assert [example.where for example in examples] == [f"set.jsonl:{n}" for n in range(25) if n % 10 != 3]
    assert bad.count == 3 and bad.noted.total() == sum(example.truncated for example in examples) == 3
    assert bad.summary() == (
        "3 of 25 rows skipped: 3 x column 'output' is empty (first set.jsonl:3); "
        "changed of 25 rows: 3 x cut off at data.max_len (first set.jsonl:4)"
    )


@pytest.mark.stack
def test_several_processes_give_the_same_examples_in_the_same_order(tokenizer):
    encoder, rows = ConversationEncoder(tokenizer, CONFIG), make_rows(150)
    alone, together = BadRows("skip"), BadRows("skip")
    assert list(encode_rows(encoder, rows, together, workers=2)) == list(encode_rows(encoder, rows, alone))
    assert together == alone


def test_the_first_bad_row_stops_the_run_with_on_bad_row_stop(tokenizer):
    with pytest.raises(DataError, match=r"set\.jsonl:3: column 'output' is empty.*data\.on_bad_row=skip"):
        list(encode_rows(ConversationEncoder(tokenizer, CONFIG), make_rows(25), BadRows("stop")))


@pytest.mark.stack
def test_rows_are_read_only_when_their_results_are_needed(tokenizer):
    rows = iter(make_rows(3000))
    for workers in (0, 1):
        next(encode_rows(ConversationEncoder(tokenizer, CONFIG), rows, BadRows("skip"), workers))
        assert next(rows).line < 600 * (workers + 1)


def test_a_long_list_of_reasons_is_shortened():
    bad = BadRows("skip")
    for number in range(8):
        bad.add(f"f:{number}", f"reason {number % 7}")
    assert bad.summary().startswith("8 rows skipped: 2 x reason 0 (first f:0), 1 x reason 1 (first f:1)")
    assert bad.summary().endswith("2 more reasons")
    assert BadRows("skip").summary() == ""


def test_row_errors_pickle():
    error = pickle.loads(pickle.dumps(RowError("f:1", "broken")))
    assert (str(error), error.where, error.reason) == ("f:1: broken", "f:1", "broken")


class Ending:
    """An encoder whose process ends, as the system ends one that takes too much memory."""

    def encode(self, row):
        os._exit(9)


@pytest.mark.notices(
    "the end of a process that encodes rows is a traceback",
    "data/encode.py",
    "except BrokenProcessPool:",
    "except ImportError:",
)
def test_a_worker_that_is_ended_is_one_message():
    rows = [Row({}, "rows", 1)]
    with pytest.raises(RunError, match=r"data\.dataloader_num_workers=1: a process that encodes rows was ended"):
        list(encode_rows(Ending(), rows, BadRows("skip"), workers=1))
