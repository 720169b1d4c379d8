"""Rows to answers, whatever the order in which engines finish: each answer to its own row, each sample drawn anew."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.data.generation import Generation
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.errors import RunError
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.offline.answers import Answerer
from rlhf_suite.rewards.base import RewardFailure, Scored
from rlhf_suite.rl.sampling import Sampler
from rlhf_suite.rl.scoring import Scorer
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.journal import Journal


class Pool:
    """In place of engines: an answer says the number of its row and its sample. What was asked last is done first, of
    what is asked while the loop comes round; answers to the row `late` wait until something is scored."""

    def __init__(self, tokenizer, late=None) -> None:
        self.tokenizer, self.loop, self.waiting, self.late = tokenizer, LoopThread("engines"), [], late
        self.asked, self.start, self.has_scored = [], self.loop.start, asyncio.Event()

    async def generate(self, request):
        self.asked.append(request)
        mine = asyncio.get_running_loop().create_future()
        self.waiting.append(mine)
        await asyncio.sleep(0)
        self.waiting.pop().set_result(None)
        await mine
        row = int(self.tokenizer.decode(request.prompt_ids).removeprefix("row "))
        if row == self.late:
            await asyncio.wait_for(self.has_scored.wait(), 60)
        number = 2 * row + request.id
        reason = "length" if number % 3 == 0 else "stop"
        ids = np.array(self.tokenizer(f"{number:04d}")["input_ids"], np.int32)
        return Generation(request.id, ids, np.zeros(0, np.float32), reason, np.zeros(len(ids), np.int32))


class Numbers(Scorer):
    """Scores that are the numbers in the responses; those to the rows `broken` fail."""

    def __init__(self, pool, folder, broken=(), **config):
        journal = Journal(LoggerConfig(progress=False), RunFolder(folder), "generate")
        super().__init__(RewardConfig.of("generate", **config), pool.tokenizer, None, journal)
        self.pool, self.broken, self.parts = pool, broken, 0

    def outcomes(self, episodes, samples):
        self.parts += 1
        numbers = [int(sample.response) for sample in samples]
        return [RewardFailure("no", "error") if n // 2 in self.broken else Scored(-n, n) for n in numbers], {}

    def score(self, groups):
        result = super().score(groups)
        self.pool.loop.loop.call_soon_threadsafe(self.pool.has_scored.set)
        return result


@pytest.fixture
def answered():
    return answers()


def answers(late=None, folder=None, **scorer):
    """Answers to rows 10 to 39 in chunks of 5, the 17th of which is malformed; two samples of each. In a folder they
    are scored."""
    config = Run.of("generate")
    config.data.input_key, config.data.apply_chat_template = "input", False
    config.data.max_len, config.rollout.max_new_tokens, config.rollout.n_samples_per_prompt = 20, 8, 2
    tokenizer = load_tokenizer("builtin:tiny", config.data)
    pool = Pool(tokenizer, late)
    rows = [Row({"input": f"row {n}", "kept": n}, "rows", n) for n in range(10, 40)]
    rows[7] = RowError("rows:17", "not JSON")
    chunks = ((range(n, n + 5), rows[n - 10 : n - 5]) for n in range(10, 40, 5))
    sampler = Sampler(config.rollout, pool, [2], seed=42, max_len=20)
    scores = None if folder is None else Numbers(pool, folder, **scorer)
    answerer = Answerer(config, tokenizer, sampler, scores, limit=4)
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


@pytest.mark.notices(
    "rewards are written in place of scores",
    "offline/answers.py",
    "group.samples.scores.tolist()",
    "group.samples.rewards.tolist()",
)
def test_rows_are_scored_while_the_engines_write_others_and_each_score_is_that_of_its_sample(tmp_path):
    """The first row is answered when another one is scored."""
    chunks, _, answerer = answers(late=10, folder=tmp_path)
    plain, _, _ = answers()
    rows, expected = ([row for chunk in some for row in chunk.rows] for some in (chunks, plain))
    assert [{name: value for name, value in row.items() if name != "score"} for row in rows] == expected
    assert [row["score"] for row in rows] == [int(row["response"]) for row in rows]
    assert answerer.scorer.parts > 1 and [chunk.stop for chunk in chunks] == [chunk.stop for chunk in plain]
    assert sum(chunk.sums["scored"] for chunk in chunks) == len(rows)


def test_a_failed_row_is_left_out_of_its_chunk_and_a_chunk_of_them_ends_the_job(tmp_path):
    left, _, _ = answers(late=10, folder=tmp_path, broken=[11, 12], on_error="drop")
    assert [row["kept"] for row in left[0].rows] == [10, 10, 13, 13, 14, 14]
    assert (left[0].sums["samples"], left[0].sums["scored"]) == (10, 6)
    with pytest.raises(RunError, match=r"6 of 10 samples have no reward .*max_error_rate=0\.5"):
        answers(folder=tmp_path, broken=[11, 12, 13], on_error="drop")
    with pytest.raises(RunError, match=r"no\); repair the reward, or drop such groups with reward\.on_error=drop"):
        answers(late=10, folder=tmp_path, broken=range(11, 40))  # the engines would wait until something is scored
