"""Step scores are the model's probabilities at the placeholders, by transformers, whatever shares a micro-batch."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_suite.config.algo_supervised import PRMAlgoConfig
from rlhf_suite.config.data import StepDataConfig
from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.data.solutions import StepFormat
from rlhf_suite.errors import UserError
from rlhf_suite.models.process import KEY, ProcessScorer

SOLUTIONS = [
    ("reverse 2616 =", "6162"),
    ("reverse 0198 =", "89"),
    ("reverse 12 =", ""),
    ("add 1 2 =", "3 or 4, maybe"),
    ("reverse 4973 =", "3"),
]
DS = DeepSpeedConfig(param_dtype="fp32", packing_samples=True)
MAX_LEN = 25  # 7 of the 10 steps of the longest


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory):
    """A tiny model with random weights whose config.json says how it is to be asked."""
    path = tmp_path_factory.mktemp("judge") / "model"
    shutil.copytree(folder(), path)
    config = json.loads((path / "config.json").read_text())
    data = StepDataConfig(step_separator="", max_len=MAX_LEN)
    config[KEY] = StepFormat.of(data, PRMAlgoConfig(placeholder_token=";", reward_tokens=["+", "-", "0"])).saved()
    (path / "config.json").write_text(json.dumps(config))
    return path


def by_hand(path, prompt, steps):
    """P(+) among +, - and 0, read from the logits at each ; of "prompt 6;1;"."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = tokenizer(f"{prompt} " + "".join(f"{step};" for step in steps))["input_ids"]
    columns = [tokenizer(name)["input_ids"][0] for name in "+-0"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    mark = tokenizer(";")["input_ids"][0]
    return [float(logits[at][columns].softmax(-1)[0]) for at, token in enumerate(ids[:MAX_LEN]) if token == mark]


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_scores_are_those_of_the_plain_model(judge, micro_batch_size):
    found = ProcessScorer(str(judge), DS, micro_batch_size=micro_batch_size).score(SOLUTIONS)
    assert [len(each.scores) for each in found] == [4, 2, 0, 7, 1]
    for (prompt, response), each in zip(SOLUTIONS, found, strict=True):
        steps = [char for char in response if char != " "]
        assert each.scores == pytest.approx(by_hand(judge, prompt, steps), abs=1e-6) if steps else each.scores == []
        assert each.truncated == (len(steps) > len(each.scores))
    assert found[3].truncated
    assert found[2].aggregated("min") == 0
    assert found[0].aggregated("min") == min(found[0].scores)


def test_a_model_that_does_not_say_how_it_is_asked_is_refused(folder):
    with pytest.raises(UserError, match=r"reward\.process\.model_name_or_path=.*no process_reward.*task=prm"):
        ProcessScorer(str(folder()), DS, flag="reward.process.model_name_or_path")
