"""`task=score`: scores by a reward model are transformers' own; by a file they survive a failure; best of n, pairs."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from plain_judge import PlainJudge
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.reward import NormalizationConfig
from rlhf_suite.data.steps import StepFormat
from rlhf_suite.errors import RunError
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.models.process_reward_model import KEY
from rlhf_suite.models.reward_model import score_constants
from small_runs import batch_run

pytestmark = pytest.mark.stack

SAMPLES = 3
REWARD = """
from pathlib import Path

def reward_func(queries, prompts, labels):
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    if "1007" in labels and not (Path(__file__).parent / "mended").exists():
        raise ValueError("not yet")
    return {"rewards": [sum(a == b for a, b in zip(r, label)) for r, label in zip(responses, labels)]}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A reward model whose head says something, with the statistics that normalisation needs."""
    folder = tmp_path_factory.mktemp("rm") / "model"
    create_tiny(folder)
    torch.manual_seed(0)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    plain.config.reward_mean, plain.config.reward_std = 0.5, 2.0
    plain.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """40 prompts of three samples each, whose labels are 1000 to 1039; the responses match in 0 to 4 digits."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    made = [
        {"id": n, "prompt": f"say {1000 + n}:", "response": answer, "label": str(1000 + n), "sample": sample}
        for n in range(40)
        for sample, answer in enumerate([f"{1000 + n + n % 2}", f"9{n:03d}", "10x" if n % 5 else f"{1000 + n}"])
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.notices(
    "scores that are to be centred are standardised",
    "models/reward_model.py",
    "    return (stats[0], 1.0) if config.normalize_mean_only else stats",
    "    return stats",
)
def test_scores_are_standardised_only_centred_or_left_alone(model):
    assert score_constants(str(model), NormalizationConfig.of("serve_rm")) is None
    assert score_constants(str(model), NormalizationConfig.of("serve_rm", normalize_enable=True)) == (0.5, 2.0)
    centred = NormalizationConfig.of("serve_rm", normalize_enable=True, normalize_mean_only=True)
    assert score_constants(str(model), centred) == (0.5, 1.0)


@torch.no_grad()
def test_a_reward_model_scores_as_transformers_does(ranks, model, tmp_path):
    """Rows that are out of order by length, in micro-batches of a few tokens, one of them cut at data.max_len."""
    sources = [{"input": f"add {n * 37 % 1000} {10 ** (n % 3)} =", "output": str(n)} for n in range(50)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sources))
    line = (
        f"task=score data.dataset={tmp_path}/rows.jsonl data.input_key=input data.output_key=output "
        f"ds.param_dtype=fp32 data.max_samples=50 score.chunk_size=7 data.max_len=15 score.max_tokens_per_gpu=40 "
        f"reward.model_name_or_path={model} score.output_path="
    )
    metrics = ranks(1).call(batch_run, tmp_path / "a", f"{line}{tmp_path}/raw.jsonl")[0]
    ranks(1).call(batch_run, tmp_path / "b", f"{line}{tmp_path}/normal.jsonl reward.normalize_enable=true")
    plain = AutoModelForSequenceClassification.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    written = [read(tmp_path / f"{name}.jsonl") for name in ("raw", "normal")]
    lengths = set()
    for row, normal, source in zip(*written, sources, strict=True):
        ids = [*tokenizer(source["input"] + source["output"])["input_ids"], tokenizer.eos_token_id][:15]
        lengths.add(len(ids))
        expected = float(plain(input_ids=torch.tensor([ids])).logits[0, 0])
        assert row == {**source, "score": pytest.approx(expected, abs=1e-5)}
        assert normal["score"] == pytest.approx((row["score"] - 0.5) / 2, abs=1e-5)
    assert len(lengths) > 1 and max(lengths) == 15
    scores = [row["score"] for row in written[0]]
    assert metrics["score"] == pytest.approx(sum(scores) / 50, abs=1e-5)


@pytest.fixture(scope="module")
def step_model(tmp_path_factory):
    """A process reward model with random weights, of which every character is a step."""
    folder = tmp_path_factory.mktemp("prm") / "model"
    create_tiny(folder)
    config = json.loads((folder / "config.json").read_text())
    data = DataConfig.of("prm", step_separator="", max_len=20)
    algo = AlgoConfig.of("prm", placeholder_token=";", reward_tokens=["+", "-"])
    config[KEY] = StepFormat.of(data, algo).to_json()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_process_reward_model_scores_every_step(ranks, step_model, tmp_path):
    """A solution that is longer than those of training has no score, and is left out."""
    source = tmp_path / "solutions.jsonl"
    pairs = [("add 1 2 =", "3"), ("add 3 4 =", "seven"), ("add 5 6 =", "eleven")]
    source.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs))
    line = (
        f"task=score data.dataset={source} reward=prm reward.process.model_name_or_path={step_model} "
        f"reward.process.aggregate=mean reward.on_error=drop ds.param_dtype=fp32 score.max_tokens_per_gpu=22"
    )
    metrics = ranks(1).call(batch_run, tmp_path / "run", line)[0]
    assert (metrics["rows"], metrics["written"]) == (3, 2)
    judge = PlainJudge(step_model)
    found = read(tmp_path / "run" / "scores.jsonl")
    for row, (prompt, response) in zip(found, pairs[:2], strict=True):
        expected = judge.scores(prompt, response)
        assert (row["prompt"], row["response"]) == (prompt, response)
        assert row["step_scores"] == pytest.approx(expected, abs=1e-6)
        assert len(row["step_scores"]) == len(response)
        assert row["score"] == pytest.approx(sum(expected) / len(response), abs=1e-6)


def test_a_file_scores_and_a_run_that_failed_goes_on(answers, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    line = (
        f"task=score data.dataset={answers} data.label_key=label reward.remote_url={reward} score.chunk_size=9 "
        "ckpt.load_enable=true"
    )
    with pytest.raises(RunError, match="not yet"):
        batch_run(None, tmp_path / "run", line)
    begun = (tmp_path / "run" / "scores.jsonl.part").read_bytes()
    assert len(begun.splitlines()) == 18  # two chunks; the label 1007 is in the third
    (tmp_path / "mended").touch()
    batch_run(None, tmp_path / "run", line)
    assert (tmp_path / "run" / "scores.jsonl").read_bytes().startswith(begun)
    scored = read(tmp_path / "run" / "scores.jsonl")
    assert [{k: v for k, v in row.items() if k != "score"} for row in scored] == read(answers)
    for row in scored:
        assert row["score"] == sum(a == b for a, b in zip(row["response"], row["label"], strict=False))
    best, pairs = (tmp_path / f"{name}.jsonl" for name in ("best", "pairs"))
    for path, flag in ((best, "best_of_n"), (pairs, "pairs")):
        more = f"score.{flag}=true score.output_path={path} score.chunk_size=4"
        batch_run(None, tmp_path / flag, f"{line} {more}")
    groups = [scored[i : i + SAMPLES] for i in range(0, len(scored), SAMPLES)]
    assert read(best) == [max(group, key=lambda row: row["score"]) for group in groups]
    assert [(row["id"], row["chosen_score"], row["rejected_score"]) for row in read(pairs)] == [
        (group[0]["id"], max(scores), min(scores))
        for group in groups
        if len(set(scores := [row["score"] for row in group])) > 1
    ]
    assert set(read(pairs)[0]) == {"id", "prompt", "label", "chosen", "rejected", "chosen_score", "rejected_score"}


def test_parts_and_chunks_divide_no_prompt(answers, tmp_path):
    line = f"task=score data.dataset={answers} data.label_key=label reward.rule=exact_match score.best_of_n=true "
    target = tmp_path / "best.jsonl"
    for part in (0, 1, 2, 3):
        more = f"score.shard={part}/4 score.output_path={target} score.chunk_size=4"
        batch_run(None, tmp_path / f"{part}", line + more)
    found = [row for part in range(4) for row in read(tmp_path / f"best-0000{part}-of-00004.jsonl")]
    assert [row["id"] for row in found] == list(range(40))
    assert [row["score"] for row in found] == [float(n % 2 == 0 or n % 5 == 0) for n in range(40)]
