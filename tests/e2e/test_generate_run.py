"""`task=generate` on a real engine: what it writes, and that a killed run goes on as if nothing had happened."""

from __future__ import annotations

import json

import jobs
import pyarrow.parquet as pq
import pytest

PROMPTS, SAMPLES = 120, 4


@pytest.fixture(scope="module")
def words(warm, tmp_path_factory):
    """Prompts from a file with columns of its own, one of which is no prompt."""
    rows = [{"id": n, "question": f"reverse {n:04d} =", "label": f"{n:04d}"[::-1]} for n in range(PROMPTS)]
    rows[7]["question"] = None
    source = tmp_path_factory.mktemp("data") / "questions.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "task=generate",
        f"actor.model_name_or_path={warm}",
        f"data.prompt_dataset={source}",
        "data.input_key=question",
        "data.label_key=label",
        "data.max_len=64",
        f"rollout.n_samples_per_prompt={SAMPLES}",
        "rollout.max_new_tokens=16",
        "reward.rule=exact_match",
        "ds.param_dtype=fp32",
        "launch.timeout_s=120",
    ]


@pytest.fixture(scope="module")
def whole(runs, words):
    jobs.run(runs / "generated", words)
    return runs / "generated"


def rows_of(folder):
    return [json.loads(line) for line in (folder / "generations.jsonl").read_text().splitlines()]


def test_every_prompt_has_its_samples_in_order_beside_its_own_columns(whole):
    rows = rows_of(whole)
    numbers = [n for n in range(PROMPTS) if n != 7]
    assert [(row["id"], row["sample"]) for row in rows] == [(n, s) for n in numbers for s in range(SAMPLES)]
    for row in rows:
        assert row["question"] == row["prompt"] == f"reverse {row['id']:04d} ="
        assert row["label"] == f"{row['id']:04d}"[::-1]
        assert row["score"] == float(row["response"] == row["label"])
        assert (row["finish_reason"] == "stop") == (row["num_tokens"] < 16)
        end = "<|im_end|>" if row["finish_reason"] == "stop" else ""
        assert row["reward_query"] == row["prompt"] + row["response"] + end
    assert len({row["response"] for row in rows}) > PROMPTS  # samples of a prompt differ


def test_the_status_counts_what_was_written(whole):
    rows, status = rows_of(whole), json.loads((whole / "status.json").read_text())
    metrics = status["metrics"]
    assert (metrics["prompts"], metrics["skipped"], metrics["samples"]) == (PROMPTS - 1, 1, len(rows))
    assert metrics["tokens"] == sum(row["num_tokens"] for row in rows)
    assert metrics["score"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))


@pytest.mark.proof
def test_a_killed_shard_continues_and_its_best_of_n_are_lines_of_the_whole(runs, words, whole):
    """The killed run has small chunks and takes the second half; the one that continues it has two engines."""
    target, folder = runs / "shared" / "best.jsonl", runs / "shard"
    more = [f"generate.output_path={target}", "generate.chunk_size=3", "generate.best_of_n=true"]
    more += ["generate.shard=1/2", "ckpt.load_enable=true"]
    job = jobs.Job(folder, [*words, *more])
    job.wait_for(lambda: next_row(folder) > PROMPTS // 2)
    jobs.survivors(job.kill(), 15)
    assert PROMPTS // 2 < next_row(folder) < PROMPTS
    written = target.with_name("best-00001-of-00002.jsonl")
    assert not written.exists()
    jobs.run(folder, [*words, *more, "vllm.num_engines=2"])
    groups = {}
    for line in (whole / "generations.jsonl").read_bytes().splitlines(keepends=True):
        groups.setdefault(json.loads(line)["id"], []).append(line)
    best = [max(groups[n], key=lambda line: json.loads(line)["score"]) for n in range(PROMPTS // 2, PROMPTS)]
    assert written.read_bytes() == b"".join(best)


def next_row(folder):
    """The row that the run's progress is at."""
    record = folder / "progress.json"
    return json.loads(record.read_text())["next_row"] if record.exists() else 0


@pytest.mark.proof
def test_a_killed_engine_is_started_again_and_every_response_is_the_same(runs, words, whole):
    folder = runs / "generated_with_a_death"
    few = ["generate.chunk_size=3", "vllm.max_num_seqs=16"]  # at a time: the engine is not far ahead of the file
    job = jobs.Job(folder, [*words, *few])
    job.wait_for(lambda: next_row(folder) > PROMPTS // 4)
    job.actor("engine-0").kill()
    ended = job.ended()
    assert ended.code == 0, ended.err
    assert "engine-0 died during" in ended.err and "(restart 1 of 3, vllm.max_restarts)" in ended.err
    assert (folder / "generations.jsonl").read_bytes() == (whole / "generations.jsonl").read_bytes()


@pytest.mark.proof
def test_a_saved_model_is_measured_on_benchmarks_as_an_evaluation_does(runs, warm, tmp_path):
    rows = [{"question": f"reverse {n:04d} =", "answer": f"#### {str(n)[::-1]}"} for n in range(6)]
    asked = [{"problem": "What is 1 + 1?", "answer": "2"}]
    for name, own in (("gsm8k", rows), ("math500", asked)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    spec = ",".join(f"{name}:{tmp_path / name}.jsonl" for name in ("gsm8k", "math500"))
    words = ["task=generate", f"actor.model_name_or_path={warm}", f'generate.benchmark="{spec}"']
    words += ["data.max_samples=4", "data.max_len=256", "ds.param_dtype=fp32", "launch.timeout_s=120"]
    jobs.run(runs / "measured", words)
    lines = [json.loads(line) for line in (runs / "measured" / "benchmarks.jsonl").read_text().splitlines()]
    assert [(line["benchmark"], line["questions"]) for line in lines] == [("gsm8k", 4), ("math500", 1)]
    metrics = json.loads((runs / "measured" / "status.json").read_text())["metrics"]
    assert {"eval/math500/pass1_low", "eval/gsm8k/flexible"} <= metrics.keys()
    assert pq.read_table(runs / "measured" / "evaluations" / "gsm8k" / "step_000000.parquet").num_rows == 4
