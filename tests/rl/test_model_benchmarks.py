"""Benchmarks: what a question becomes, how answers are read, intervals by hand, and what a result records."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_suite.config.declarations.benchmarks import BENCHMARKS
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.config.declarations.rollout import RolloutConfig
from rlhf_suite.data.benchmarks import load_benchmarks
from rlhf_suite.data.generation import Generation
from rlhf_suite.data.row import RowError
from rlhf_suite.errors import UserError
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.rewards.base import LabelError, Sample
from rlhf_suite.rewards.rules import gsm8k
from rlhf_suite.rl.benchmarks import BenchmarkEvaluator, interval
from rlhf_suite.rl.rollout_file import SampleFiles
from rlhf_suite.rl.sampling import Sampler
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.journal import Journal

SOLUTION = "He has 3 * 14 = <<3*14=42>>42 apples.\n#### 42"


def score(response: str, label: str = SOLUTION) -> tuple[float, float]:
    """Return what the strict and the flexible reading say."""
    scored = gsm8k(Sample("", "", response, label, ""), RuleConfig())
    return scored.score, scored.extra["flexible"]


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("So it is 42.\n#### 42", 1, 1),
        ("#### $42.", 0, 1),  # a dollar sign before the number is no part of the strict form
        ("#### 42.", 1, 1),
        ("#### 4,2", 1, 1),
        ("#### 42.0", 0, 0),
        ("#### 41\n#### 42", 0, 1),
        ("#### 42 of 50", 1, 0),
        ("The answer is 42", 0, 1),
        ("The answer is $42.", 0, 1),
        ("####42", 0, 1),
        ("", 0, 0),
        ("no number", 0, 0),
    ],
)
def test_the_two_readings_of_an_answer_to_gsm8k(response, strict, flexible):
    assert score(response) == (strict, flexible)


def test_labels_of_gsm8k_are_numbers_or_solutions():
    assert score("#### -1000", "x\n#### -1,000") == (1, 1) and score("#### 7", "7") == (1, 1)
    with pytest.raises(LabelError, match="does not end with a number"):
        score("#### 7", "seven")


@pytest.mark.notices(
    "Wilson's interval is that of the normal distribution",
    "rl/benchmarks.py",
    "middle = (share + Z**2 / (2 * questions)) / scale",
    "middle = share",
)
def test_the_interval_of_one_sample_per_question_is_wilsons():
    """Both ends are where (share - p)^2 = Z^2 p (1 - p) / n, which is how Wilson defines them."""
    z = 1.959963984540054
    for share, questions in ((0.0, 10), (0.3, 10), (0.5, 500), (1.0, 30)):
        for end in interval(share, questions, None, 1):
            assert (share - end) ** 2 == pytest.approx(z**2 * end * (1 - end) / questions, abs=1e-12)


def test_the_interval_of_several_samples_has_questions_as_clusters():
    shares = np.array([1.0, 0.5, 0.25, 0.0])  # of four samples each
    error = math.sqrt(((shares - shares.mean()) ** 2).sum() / 3 / 4)
    low, high = interval(shares.mean(), 4, error, 4)
    assert (low, high) == pytest.approx((max(0, 0.4375 - 1.959964 * error), 0.4375 + 1.959964 * error), rel=1e-6)
    assert interval(0.95, 4, 0.2, 4)[1] == 1.0


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write rows in the format of the file's name."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(spec: str, **config):
    data = DataConfig.of("ppo", prompt_dataset="x", **config)
    return load_benchmarks(EvalConfig.of("ppo", benchmark=spec), data, load_tokenizer("builtin:tiny", data))


ROWS = {
    "gsm8k": [{"question": "How many?", "answer": SOLUTION}],
    "math500": [{"problem": "x?", "solution": r"\boxed{2}", "answer": "2", "subject": "Algebra", "level": 2}],
    "aime": [{"ID": "2024-I-1", "Problem": "How many?", "Solution": "...", "Answer": 42}],
    "ifeval": [
        {"key": 1, "prompt": "Say it.", "instruction_id_list": ["a:b"], "kwargs": [{"num_words": None, "x": "ö"}]}
    ],
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_files_of_the_data_sets_become_prompts(tmp_path, name, suffix):
    (questions,) = load(f"{name}:{write_rows(tmp_path / f'test.{suffix}', ROWS[name])}")
    (prompt,) = questions.prompts
    row, is_question = ROWS[name][0], ("question", "problem", "prompt")
    asked = next(value for column, value in row.items() if column.lower() in is_question)
    assert prompt.text == BENCHMARKS[name].prompt.replace("{question}", asked) and prompt.source == name
    if name == "ifeval":
        assert json.loads(prompt.label) == {"instruction_id_list": ["a:b"], "kwargs": [{"x": "ö"}]}
    else:
        assert prompt.label == str(row.get("answer", row.get("Answer")))


@pytest.mark.notices(
    "a benchmark with other questions has the same fingerprint",
    "config/declarations/benchmarks.py",
    "[declared, list(questions), shown]",
    "[declared, len(questions), shown]",
)
def test_the_fingerprint_changes_with_all_that_a_number_depends_on(tmp_path, monkeypatch):
    spec = f"gsm8k:{write_rows(tmp_path / 'a.jsonl', ROWS['gsm8k'])}"
    first = load(spec)[0].fingerprint
    same = f"gsm8k:{write_rows(tmp_path / 'b.parquet', ROWS['gsm8k'])}"
    assert load(same)[0].fingerprint == first, "the name and the format of the file do not count"
    other = f"gsm8k:{write_rows(tmp_path / 'c.jsonl', [{'question': 'How few?', 'answer': SOLUTION}])}"
    changed = [load(other)[0].fingerprint, load(spec, max_len=1024)[0].fingerprint]
    for change in ({"prompt": "{question}"}, {"rule": "math"}, {"samples": 2}, {"temperature": 0.5}, {"top_p": 0.9}):
        monkeypatch.setitem(BENCHMARKS, "gsm8k", replace(BENCHMARKS["gsm8k"], **change))
        changed.append(load(spec)[0].fingerprint)
        monkeypatch.undo()
    assert len({first, *changed}) == 1 + len(changed)


def test_a_row_without_an_answer_ends_the_reading(tmp_path):
    spec = f"gsm8k:{write_rows(tmp_path / 'a.jsonl', [*ROWS['gsm8k'], {'question': 'And?'}])}"
    with pytest.raises(RowError, match=r"a\.jsonl.*2.*no text or number in the column answer"):
        load(spec)
    with pytest.raises(UserError, match="it has no rows"):
        load(f"gsm8k:{write_rows(tmp_path / 'empty.jsonl', [])}")


class Engines:
    """In place of vLLM: the answers are given, one after the other."""

    def __init__(self, tokenizer, answers):
        self.asked, self.loop = [], LoopThread("engines")
        self.start, self.tokenizer, self.answers = self.loop.start, tokenizer, iter(answers)

    async def generate(self, request):
        self.asked.append(request)
        ids = np.array(self.tokenizer(next(self.answers), add_special_tokens=False).input_ids, np.int32)
        return Generation(request.id, ids, np.zeros(len(ids), np.float32), "stop", np.zeros(len(ids), np.int32))


@pytest.mark.stack
@pytest.mark.notices(
    "a step that is run again is in the results on benchmarks twice",
    "rl/benchmarks.py",
    "if is_earlier(row, line)]",
    "if True]",
)
@pytest.mark.notices(
    "a benchmark is sampled as the run samples", "rl/benchmarks.py", "max_new_tokens=benchmark.max_new_tokens, ", ""
)
def test_a_benchmark_is_asked_scored_and_recorded(tmp_path):
    rows = [{"question": f"{number}?", "answer": f"#### {number}"} for number in range(4)]
    data = DataConfig.of("ppo", prompt_dataset="x", max_len=4096)
    tokenizer = load_tokenizer("builtin:tiny", data)
    config = EvalConfig.of("ppo", benchmark=f"gsm8k:{write_rows(tmp_path / 'test.jsonl', rows)}", max_samples=3)
    (questions,) = load_benchmarks(config, data, tokenizer)
    folder, files = RunFolder(tmp_path / "run"), SampleFiles()
    folder.start("it")
    folder.evaluations.mkdir()
    folder.logs.mkdir(exist_ok=True)
    journal = Journal(LoggerConfig(progress=False), folder, "ppo")
    engines = Engines(tokenizer, ["#### 0", "so 1", "#### 7"])
    rollout = RolloutConfig.of("ppo", temperature=1.0, max_new_tokens=5, top_p=0.5)
    sampler = Sampler(rollout, engines, [2], seed=42, max_len=4096)
    evaluator = BenchmarkEvaluator(config, questions, sampler, tokenizer, journal, files)
    old = [{"step": 6, "benchmark": "gsm8k"}, {"step": 7, "benchmark": "math500"}]
    later = [{"step": 7, "benchmark": "gsm8k"}, {"step": 8, "benchmark": "gsm8k"}]  # before the run was resumed
    folder.benchmarks.write_text("".join(json.dumps(row) + "\n" for row in (*old, *later)) + '{"step": 9, "bench')
    metrics = evaluator.evaluate(7)
    files.finish()
    assert [(request.max_new_tokens, request.sampling.temperature) for request in engines.asked] == [(1024, 0.0)] * 3
    assert metrics["eval/gsm8k/pass1"] == pytest.approx(1 / 3)
    assert metrics["eval/gsm8k/flexible"] == pytest.approx(2 / 3)
    assert metrics["eval/gsm8k/pass1_low"] < 1 / 3 < metrics["eval/gsm8k/pass1_high"]
    *kept, line = [json.loads(line) for line in folder.benchmarks.read_text().splitlines()]
    assert kept == old
    assert (line["step"], line["benchmark"], line["fingerprint"]) == (7, "gsm8k", questions.fingerprint)
    assert line["prompt"] == BENCHMARKS["gsm8k"].prompt and line["questions"] == 3
    assert line["metrics"]["pass1"] == metrics["eval/gsm8k/pass1"]
    assert (folder.evaluations / "gsm8k" / "step_000007.parquet").exists()
