"""A whole run with a frozen judge on engines of its own: its weights stay those of its folder, whatever is trained."""

from __future__ import annotations

import json

import jobs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_suite.config.declarations.reward import JudgeConfig
from rlhf_suite.models.builtin import builtin_folder
from rlhf_suite.rewards.base import Sample
from rlhf_suite.rewards.questions import Questioner, number_of
from rlhf_suite.rewards.rubric import read_rubric

RUBRIC = "Is it right?\n{prompt}\n{response}\n"
MODEL = "builtin:tiny"  # its weights are random, and those of the policy are not
JUDGE = [
    *("reward.judge.mode=yes_no", f"reward.judge.model={MODEL}", "reward.judge.max_len=4096"),
    *("vllm.kv_cache_mb=32", "algo.kl.init_coef=0", "eval.dataset=null", "eval.steps=-1"),
]
GDPO = [
    *("algo.advantage.estimator=gdpo", "algo.advantage.reward_parts=[judge/mean,short/mean]"),
    *("algo.advantage.reward_part_weights=[2,1]", "reward.rules.length_limit=3"),
]


def probabilities(rows) -> list[float]:
    """Return P(Yes) / (P(Yes) + P(No)) of each sample, by transformers and the weights of the folder."""
    folder = builtin_folder(MODEL, "reward.judge.model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))
    about = {"model": MODEL, "body": {}, "engines": True}
    questioner = Questioner(read_rubric(RUBRIC), JudgeConfig(model=MODEL, mode="yes_no"), about, seed=42)
    found = []
    for row in rows:
        question = questioner.about_one(Sample("", row["prompt"], row["response"], row["label"], ""))
        text = tokenizer.apply_chat_template(
            question.messages(number_of(question.key, 0, 42)), tokenize=False, add_generation_prompt=True
        )
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits[0, -1].double()
        found.append(float(torch.sigmoid(logits[yes] - logits[no])))
    return found


def standardise(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std(ddof=1) + 1e-9)


@pytest.mark.proof
def test_the_weights_of_a_judge_never_change_and_its_reward_is_a_part_of_gdpo(runs, warm, tmp_path):
    """Every number of the judge, in every step, is that of its folder, while the policy moves away from its own."""
    (tmp_path / "rubric.md").write_text(RUBRIC)
    sources = f"reward.sources={{judge: {{rubric: {tmp_path / 'rubric.md'}}}, short: {{rule: length, weight: 0.5}}}}"
    folder = runs / "judged_on_engines"
    words = [*(word for word in jobs.SMALL if not word.startswith("eval.")), *JUDGE, *GDPO, "reward.rule=null"]
    words += [f"actor.model_name_or_path={warm}", sources, "train.max_steps=3", "actor.adam.lr=0.01"]
    jobs.run(folder, words)
    for step, metrics in enumerate(jobs.train_rows(folder), 1):
        rows = jobs.rollout(folder, step)
        assert [row["reward/judge/mean"] for row in rows] == pytest.approx(probabilities(rows), rel=1e-4)
        assert [row["reward"] for row in rows] == pytest.approx(
            [row["reward/judge/mean"] + 0.5 * row["reward/short/mean"] for row in rows]
        )
        assert metrics["judge/answers"] == 16 and metrics["judge/no_verdict"] == 0
        groups = np.array([row["group"] for row in rows])
        total = np.zeros(len(rows))
        for name, weight in (("judge/mean", 2.0), ("short/mean", 1.0)):
            values = np.array([row[f"reward/{name}"] for row in rows])
            for group in np.unique(groups):
                total[groups == group] += weight * standardise(values[groups == group])
        expected = standardise(total)
        for row, advantage in zip(rows, expected, strict=True):
            of_model = np.array(row["advantages"])[np.array(row["mask"], bool)]
            assert of_model == pytest.approx(advantage, abs=1e-4)
    trained, first = (
        AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight for path in (folder / "model", warm)
    )
    assert (trained - first).abs().max() > 0.01
    lines = [json.loads(line) for line in (folder / "logs" / "judge.jsonl").read_text().splitlines()]
    assert all(line["reply"] in ("Y", "N") and line["tries"] == 1 for line in lines)
    busy = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    assert "judging" in {interval["what"] for interval in busy if interval["who"] == "judge"}
    assert (folder / "logs" / "judge-0.log").exists() and (folder / "logs" / "judge-0.json").exists()


@pytest.mark.proof
def test_a_judge_that_says_nothing_of_use_costs_groups_and_no_run_a_score_of_zero(runs, warm, tmp_path):
    """The tiny model writes random characters where a verdict was asked for."""
    (tmp_path / "rubric.md").write_text("Grade.\n{response}\n")
    words = [*(word for word in jobs.SMALL if not word.startswith("eval.")), "reward.rule=null"]
    words += [*JUDGE[1:], f"actor.model_name_or_path={warm}", "train.max_steps=1", "reward.judge.max_new_tokens=16"]
    words += [f"reward.rubric={tmp_path / 'rubric.md'}", "reward.on_error=drop", "algo.advantage.estimator=rloo"]
    folder = runs / "judged_by_noise"
    ended = jobs.run(folder, words, expect=1)
    assert "none of 16 samples has a reward" in ended.out + ended.err
    failures = [json.loads(line) for line in (folder / "logs" / "reward_failures.jsonl").read_text().splitlines()]
    assert {failure["reason"].partition(":")[0] for failure in failures} == {"the judge gives no verdict"}
