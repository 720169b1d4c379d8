"""An RL run whose estimator, policy loss, reward rule, row format and filters are the user's own, in other folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jobs
import numpy as np
import pytest
import yaml

pytestmark = pytest.mark.proof

EXAMPLE = Path(__file__).parents[2] / "experiments" / "own_code" / "own.py"
FORK = EXAMPLE.with_name("async_fork.py")
RENAMED = """

def renamed(row):
    return {"input": row["question"], "label": row["answer"]}


def from_the_lower_half(group):
    return "a large number" if int(group.labels[0][::-1]) >= 1016 else None
"""


@pytest.fixture(scope="module")
def run(runs, warm):
    home = runs / "own_code"
    home.mkdir(parents=True)
    own = home / "own.py"
    shutil.copy(EXAMPLE, own)
    own.write_text(own.read_text() + RENAMED)
    rows = [{"question": f"reverse {number} =", "answer": str(number)[::-1]} for number in range(1000, 1032)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *(word for word in jobs.SMALL if not word.startswith(("eval.", "data."))),
        f"algo.advantage.estimator={own}:median_baseline",
        f"actor.policy_loss_type={own}:squared_ratio",
        f"reward.rule={own}:first_digit",
        "data.label_key=label",
        f"data.prompt_dataset={home}/rows.jsonl",
        f"data.row_format={own}:renamed",
        f"algo.group_filter={own}:from_the_lower_half",
        f"algo.prompt_filter={FORK}:mopps",
        "rollout.vllm_generate_batch_size=8",
        f"actor.model_name_or_path={warm}",
        "eval.dataset=null",
        "eval.steps=-1",
        "train.max_steps=2",
        "algo.kl.init_coef=0",
    ]
    jobs.run(home / "run", words)
    return home / "run", own


def test_the_rule_the_estimator_and_the_loss_are_what_the_run_trains_on(run):
    folder, _ = run
    for step in (1, 2):
        samples = jobs.rollout(folder, step)
        assert len(samples) == 16 and {sample["score"] for sample in samples} <= {0.0, 1.0}
        by_group = {}
        for sample in samples:
            by_group.setdefault(sample["group"], []).append(sample)
        for group in by_group.values():
            median = sorted(sample["reward"] for sample in group)[
                1
            ]  # the lower of the two in the middle, as torch has it
            for sample in group:
                advantages = np.array(sample["advantages"])[np.array(sample["mask"], bool)]
                assert advantages == pytest.approx(np.full(len(advantages), sample["reward"] - median))
    assert all(np.isfinite(row["train/policy_loss"]) for row in jobs.train_rows(folder))


def test_the_filters_say_what_is_sampled_and_trained_on(run):
    folder, _ = run
    for step, row in enumerate(jobs.train_rows(folder), start=1):
        assert all(int(sample["label"][::-1]) < 1016 for sample in jobs.rollout(folder, step))
        rounds = row["rollout/filter_rounds"]
        assert (
            row["rollout/prompts_not_chosen"] == 4 * rounds
            and row.get("rollout/left_out/a_large_number", 0) <= 4 * rounds
        )
    assert sum(row.get("rollout/left_out/a_large_number", 0) for row in jobs.train_rows(folder)) > 0


def test_its_files_are_written_down(run):
    folder, own = run
    recorded = yaml.safe_load((folder / "config.yaml").read_text())["own_code"]
    assert len(recorded) == 2
    assert all(any(each.startswith(f"{file} sha256:") for each in recorded) for file in (own, FORK))
