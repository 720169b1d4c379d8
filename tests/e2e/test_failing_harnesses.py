"""Harnesses that fail in every way: each episode is a failure that is counted and named, and the run goes on."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import jobs
import pytest

PROGRAM = Path(__file__).with_name("failing_harness.py")
STEPS, SAMPLES = 2, 2
# By what the prompt says: why the episode ended, and what its failure says. The program that dies has a turn, and may
# die before or after another one has begun.
ENDS = {
    "works": ("finished", ""),
    "silent": ("failed", r"^agent.score_command ended with exit code 2: .* \(before any turn of the model\)$"),
    "unreachable": ("failed", r"exit code 1: .*Connection refused.* \(before any turn of the model\)$"),
    "refused": ("failed", r"exit code 1: .*HTTP Error 401.* \(before any turn of the model\)$"),
    "dies": ("failed", "^agent.command ended with exit code 137: Killed$"),
    "exits": ("failed", "^agent.command ended with exit code 1: the tests broke$"),
    "hangs": ("timed_out", r"^the episode was not finished after agent.timeout_s=30 \(1 turns\)$"),
    "writes": ("finished", ""),
}
FAILED = sum(SAMPLES for ending, _ in ENDS.values() if ending != "finished")


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_a_run_goes_on_whatever_becomes_of_its_harnesses(runs, warm, on_error):
    rows, folder = runs / "failing.jsonl", runs / f"failing_{on_error}"
    lines = [{"messages": [{"role": "user", "content": f"{name} ="}], "label": ""} for name in ENDS] * STEPS
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = [word for word in jobs.SMALL if not word.startswith(("eval.", "data.", "rollout.", "train.", "launch."))]
    words = [
        *(f"actor.model_name_or_path={warm}", f"data.prompt_dataset={rows}", "data.input_key=messages"),
        *("data.apply_chat_template=true", "data.label_key=label", "data.max_len=256", "reward.rule=null"),
        *("algo.advantage.estimator=reinforce_baseline", "algo.kl.init_coef=0", "reward.max_error_rate=1"),
        *(f"rollout.batch_size={len(ENDS)}", f"rollout.n_samples_per_prompt={SAMPLES}", "train.batch_size=4"),
        *("train.micro_batch_size=4", "rollout.micro_batch_size=4", f"train.max_steps={STEPS}", "agent.kind=endpoint"),
        f"agent.command='{shlex.quote(sys.executable)} {PROGRAM}'",
        *("agent.score_command='wc -c < answer.txt'", f"agent.on_error={on_error}", "agent.timeout_s=30"),
        *("agent.max_concurrent=16", "eval.dataset=null", "eval.steps=-1", "launch.timeout_s=600"),
    ]
    jobs.run(folder, [*small, *words])
    steps = jobs.train_rows(folder)
    assert len(steps) == STEPS
    total = Counter[str]()
    for row in steps:
        total.update({name: row[name] for name in ("reward/errors", "reward/timeouts", "rollout/dropped_groups")})
    assert total["reward/errors"] + total["reward/timeouts"] == STEPS * FAILED
    assert total["reward/timeouts"] == STEPS * SAMPLES
    assert total["rollout/dropped_groups"] == (STEPS * FAILED / SAMPLES if on_error == "drop" else 0)
    # A turn whose tokens its text does not give again begins another ledger, if the program is killed after it began.
    kept = [row for step in range(1, STEPS + 1) for row in jobs.rollout(folder, step) if row["ledger"] == 0]
    assert len(kept) == STEPS * (len(ENDS) * SAMPLES - (FAILED if on_error == "drop" else 0))
    found = Counter(name for row in kept for name in ENDS if f"{name} =" in row["prompt"])
    assert set(found.values()) == {STEPS * SAMPLES} and len(found) == len(kept) / (STEPS * SAMPLES)
    log = [json.loads(line) for line in (folder / "logs" / "reward_failures.jsonl").read_text().splitlines()]
    for name, (ending, reason) in ENDS.items():
        said = [line["reason"] for line in log if f"{name} =" in line["prompt"]]
        assert len(said) == (0 if ending == "finished" else STEPS * SAMPLES), name
        assert all(re.search(reason, text) for text in said), (name, said)
        rewards = [row["reward"] for row in kept if f"{name} =" in row["prompt"]]
        assert all(reward == 0 for reward in rewards) or ending == "finished", name
