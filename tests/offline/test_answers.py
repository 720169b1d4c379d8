"""Rows to answers, whatever the order in which engines finish: each answer to its own row, each sample drawn anew."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlhf_suite.config.runs import GenerateRun
from rlhf_suite.data.generation import Generation
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.offline.answers import Answerer
from rlhf_suite.rl.sampling import Sampler


class Pool:
    """In place of engines: an answer says the number of its row and its sample. What was asked last is done first, of
    what is asked while the loop comes round."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.start, self.waiting = tokenizer, LoopThread("engines").start, []
        self.asked = []

    async def generate(self, request):
        self.asked.append(request)
        mine = asyncio.get_running_loop().create_future()
        self.waiting.append(mine)
        await asyncio.sleep(0)
        self.waiting.pop().set_result(None)
        await mine
        row = int(self.tokenizer.decode(request.prompt_ids).removeprefix("row "))
        number = 2 * row + request.id
        reason = "length" if number % 3 == 0 else "stop"
        ids = np.array(self.tokenizer(f"{number:04d}")["input_ids"], np.int32)
        return Generation(request.id, ids, np.zeros(0, np.float32), reason, np.zeros(len(ids), np.int32))


@pytest.fixture
def answered():
    """Answers to rows 10 to 39 in chunks of 5, the 17th of which is malformed; two samples of each."""
    config = GenerateRun()
    config.data.input_key, config.data.apply_chat_template = "input", False
    config.data.max_len, config.rollout.max_new_tokens, config.rollout.n_samples_per_prompt = 20, 8, 2
    tokenizer = load_tokenizer("builtin:tiny", config.data)
    pool = Pool(tokenizer)
    rows = [Row({"input": f"row {n}", "kept": n}, "rows", n) for n in range(10, 40)]
    rows[7] = RowError("rows:17", "not JSON")
    chunks = ((range(n, n + 5), rows[n - 10 : n - 5]) for n in range(10, 40, 5))
    sampler = Sampler(config.rollout, pool, [2], seed=42, max_len=20)
    answerer = Answerer(config, tokenizer, sampler, None, limit=4)
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
    "all rows of a file are drawn alike",
    "offline/answers.py",
    "self.encoder.encode(row), index=number)",
    "self.encoder.encode(row), index=0)",
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
