"""Step scores are the model's probabilities at the placeholders, as computed by transformers, in any micro-batch."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from plain_judge import PlainJudge
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.data.batch import TokenBatch, collate
from rlhf_suite.data.steps import StepFormat
from rlhf_suite.errors import UserError
from rlhf_suite.models.load import load_model
from rlhf_suite.models.process_reward_model import KEY, solution_encoder, split_step_scores, step_probabilities

SOLUTIONS = [
    ("reverse 2616 =", "6162"),
    ("reverse 0198 =", "89"),
    ("reverse 12 =", ""),
    ("add 1 2 =", "3 or 4, maybe"),
    ("reverse 4973 =", "3"),
]
DS = DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=True)
MAX_LEN = 25  # 7 of the 10 steps of the longest


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory):
    """A tiny model with random weights whose config.json says how it is to be asked."""
    path = tmp_path_factory.mktemp("judge") / "model"
    shutil.copytree(folder(), path)
    config = json.loads((path / "config.json").read_text())
    data = DataConfig.of("prm", step_separator="", max_len=MAX_LEN)
    config[KEY] = StepFormat.of(
        data, AlgoConfig.of("prm", placeholder_token=";", reward_tokens=["+", "-", "0"])
    ).to_json()
    (path / "config.json").write_text(json.dumps(config))
    return path


@torch.no_grad()
def found(path, micro_batch_size):
    """Scores of all solutions, so many at a time."""
    encoder = solution_encoder(str(path), "reward.process.model_name_or_path")
    model = load_model(str(path), head="lm", ds=DS, flag="reward.process.model_name_or_path")
    scores = []
    for start in range(0, len(SOLUTIONS), micro_batch_size):
        examples = [encoder.encode(*each) for each in SOLUTIONS[start : start + micro_batch_size]]
        batch = collate(examples, TokenBatch)
        probabilities = step_probabilities(model, batch, encoder.columns)
        scores += split_step_scores(batch, probabilities, [example.truncated for example in examples])
    return scores


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_scores_are_those_of_the_plain_model(judge, micro_batch_size):
    scores, plain = found(judge, micro_batch_size), PlainJudge(judge)
    assert [len(each.scores) for each in scores] == [4, 2, 0, 7, 1]
    for (prompt, response), each in zip(SOLUTIONS, scores, strict=True):
        assert each.scores == pytest.approx(plain.scores(prompt, response) if response else [], abs=1e-6)
        assert each.truncated == (len(response.replace(" ", "")) > len(each.scores))
    assert scores[3].truncated
    assert scores[2].aggregate("min") == 0
    assert scores[0].aggregate("min") == min(scores[0].scores)


def test_a_model_without_a_step_format_is_refused(folder):
    with pytest.raises(UserError, match=r"reward\.process\.model_name_or_path=.*no process_reward.*task=prm"):
        solution_encoder(str(folder()), "reward.process.model_name_or_path")
