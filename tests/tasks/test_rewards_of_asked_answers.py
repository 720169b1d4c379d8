"""Prompts that ask for a reward (`data.target_reward`) are answered as they are, and rewards judge answers to the
question alone: a reward model has never read the text that asks, and took right answers after it for wrong ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.row import Row
from rlhf_suite.data.text_encoders import PromptEncoder
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.offline.answers import Answerer, Work
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.rl.scoring import Scorer

ROW = Row({"input": "reverse 2616 =", "label": "6162"}, "q.jsonl", 1)
ASKS = ["data.target_reward=6", 'data.reward_template="{prompt} {reward:.0f} "']
CHAT = "data.apply_chat_template=true"


def answered(words):
    """Return the run of task=generate, its tokenizer and a finished answer to the row."""
    rows = ["data.prompt_dataset=builtin:reverse", "data.label_key=label", "rollout.n_samples_per_prompt=1"]
    found = preflight(parse(["task=generate", "actor.model_name_or_path=builtin:tiny", *rows, *words]))
    assert found.problems == []
    (run,) = found.runs
    tokenizer = load_tokenizer("builtin:tiny", run.data)
    answer = np.array([*tokenizer("6162", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int64)
    made = Trajectory.start(PromptEncoder(tokenizer, run.data).encode(ROW), 0, 0)
    made.append_model(answer, np.zeros(len(answer)), 0)
    made.ending = Ending.of_response("stop")
    return run, tokenizer, made


@pytest.mark.parametrize("words", [[], [CHAT]], ids=["plain", "chat"])
def test_rewards_see_the_same_whether_or_not_the_prompt_asks_for_a_reward(words):
    (_, tokenizer, usual), (_, _, asked) = answered(words), answered([*words, *ASKS])
    assert "reverse 2616 = 6 " in asked.prompt.text and "reverse 2616 = 6" not in usual.prompt.text
    assert asked.ids.tolist() != usual.ids.tolist(), "the model is asked"
    scorer = Scorer(RewardConfig.of("generate"), tokenizer, None, None)
    (seen,), (wanted,) = scorer.samples([asked]), scorer.samples([usual])
    assert (seen.query, seen.prompt, seen.response) == (wanted.query, wanted.prompt, "6162")
    assert seen.ids.tolist() == usual.ids.tolist()


def test_the_rows_of_generate_say_what_was_asked_and_give_rewards_the_question():
    run, tokenizer, asked = answered(ASKS)
    answerer = Answerer(run, tokenizer, SimpleNamespace(engines=SimpleNamespace(loop=None)), None, limit=1)
    (row,) = answerer.finish(Work(range(1), [(0, ROW, asked.prompt)], {0: [asked]})).rows
    assert row["prompt"] == "reverse 2616 = 6 "
    assert row["reward_query"] == "reverse 2616 =6162<|im_end|>"
