"""Rows to answers, whatever the order in which engines finish: each answer to its own row, each sample drawn anew."""

from __future__ import annotations

from concurrent.futures import Future
from queue import LifoQueue
from threading import Thread

import numpy as np
import pytest

from rlhf_suite.config.runs import GenerateRun
from rlhf_suite.data.generation import Generation
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.engines.requests import Dispatcher
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.offline.answers import Answerer


class Pool:
    """In place of engines: an answer says the number of its request, and what was asked last is done first."""

    def __init__(self) -> None:
        self.asked = []
        self.waiting: LifoQueue = LifoQueue()
        Thread(target=self.work, daemon=True).start()

    def submit(self, request):
        self.asked.append(request)
        future: Future = Future()
        self.waiting.put((len(self.asked), request, future))
        return future

    def work(self):
        while True:
            _, request, future = self.waiting.get()
            future.set_result(self.answer(request))

    def answer(self, request):
        ids = np.array([ord(char) + self.shift for char in f"{request.id:04d}"], np.int32)
        reason = "length" if request.id % 3 == 0 else "stop"
        return Generation(request.id, ids, np.zeros(0, np.float32), reason, np.zeros(4, np.int32))


@pytest.fixture
def answered():
    """Answers to rows 10 to 39 in chunks of 5, the 17th of which is malformed; two samples of each."""
    config = GenerateRun()
    config.data.input_key, config.data.apply_chat_template = "input", False
    config.data.max_len, config.rollout.max_new_tokens, config.rollout.n_samples_per_prompt = 20, 8, 2
    tokenizer, pool = load_tokenizer("builtin:tiny", config.data), Pool()
    pool.shift = tokenizer("0")["input_ids"][0] - ord("0")
    rows = [Row({"input": f"row {n}", "kept": n}, "rows", n) for n in range(10, 40)]
    rows[7] = RowError("rows:17", "not JSON")
    chunks = ((range(n, n + 5), rows[n - 10 : n - 5]) for n in range(10, 40, 5))
    answerer = Answerer(config, tokenizer, [2], Dispatcher(pool, limit=8), None)
    return list(answerer.answer(chunks)), pool.asked, answerer


@pytest.mark.notices(
    "answers to the first row of a chunk go to the chunk before", "offline/answers.py", 'side="right"', 'side="left"'
)
def test_each_answer_goes_to_the_row_that_asked_for_it(answered):
    chunks, _, _ = answered
    made = [row for chunk in chunks for row in chunk.rows]
    assert [(row["kept"], row["sample"]) for row in made] == [(n, s) for n in range(10, 40) if n != 17 for s in (0, 1)]
    assert [int(row["response"]) for row in made] == [2 * row["kept"] + row["sample"] for row in made]


@pytest.mark.notices(
    "all samples of a row are drawn alike",
    "offline/answers.py",
    "self.config.rollout.seed, number, sample)",
    "self.config.rollout.seed, number)",
)
def test_every_sample_of_every_row_has_a_seed_of_its_own(answered):
    _, asked, _ = answered
    assert len({request.seed for request in asked}) == len(asked) == 58


def test_chunks_come_in_order_and_count_what_they_are_made_of(answered):
    chunks, _, answerer = answered
    assert [chunk.stop for chunk in chunks] == [15, 20, 25, 30, 35, 40]
    assert [chunk.sums["skipped"] for chunk in chunks] == [0, 1, 0, 0, 0, 0]
    for chunk in chunks:
        assert chunk.sums["samples"] == len(chunk.rows) == 2 * chunk.sums["prompts"]
        assert chunk.sums["tokens"] == 4 * len(chunk.rows)
        assert chunk.sums["truncated"] == sum(row["finish_reason"] == "length" for row in chunk.rows)
    assert answerer.bad.count == 1


def test_an_answer_has_the_room_that_its_prompt_leaves(answered):
    _, asked, _ = answered
    assert {request.max_new_tokens for request in asked} == {8}
    assert {len(request.prompt_ids) for request in asked} == {6}
