"""A whole run whose responses a judge scores: its budget ends it, and its continuation pays for nothing twice."""

from __future__ import annotations

import json

import jobs
import pytest

from judge_server import JudgeServer, quoted, verdict
from rlhf_suite.run_folders.run_folder import RunFolder

RUBRIC = """Question: {prompt}
Answer: {response}

## Criteria
- many (3): It has many different characters.
- long: It is long.
"""
CALLS = 20  # of about 16 in a step, so that the second step is cut off
FAULTS = ((429, b"slowly"), (500, b"oh"), (503, b"busy"))


def judged(response: str) -> dict[str, int]:
    """Return what the judge says of a response."""
    return {"many": len(set(response)) % 11, "long": len(response) % 11}


@pytest.fixture
def judge():
    """A judge that has a fault at every seventh request."""

    def answer(body):
        count = len(server.seen)
        return FAULTS[count // 7 % len(FAULTS)] if count % 7 == 0 else verdict(body, **judged(quoted(body)[1]))

    server = JudgeServer(answer)
    yield server
    server.close()


@pytest.mark.proof
def test_a_run_that_the_budget_ended_continues_to_the_weights_of_an_undisturbed_one(runs, warm, judge, tmp_path):
    (tmp_path / "rubric.md").write_text(RUBRIC)
    words = [
        *(word for word in jobs.SMALL if not word.startswith("eval.")),
        *("eval.dataset=null", "eval.steps=-1", "train.max_steps=3", "ckpt.save_steps=1"),
        f"actor.model_name_or_path={warm}",
        *("reward.rule=null", f"reward.rubric={tmp_path / 'rubric.md'}"),
        *(f"reward.judge.url={judge.base}", "reward.judge.model=scripted", "reward.http.num_retries=4"),
        *("algo.advantage.estimator=gdpo", "algo.advantage.reward_parts=[many,long]"),
        *("algo.advantage.reward_part_weights=[3,1]", "algo.kl.init_coef=0"),
    ]
    whole, cut = runs / "judged", runs / "judged_with_a_budget"
    jobs.run(whole, words)
    for step, row in enumerate(jobs.train_rows(whole), 1):
        samples = jobs.rollout(whole, step)
        for sample in samples:
            parts = {name: value / 10 for name, value in judged(sample["response"]).items()}
            assert sample["reward"] == pytest.approx((3 * parts["many"] + parts["long"]) / 4)
        assert row["judge/answers"] == 16 and row["judge/no_verdict"] == 0
        assert row["judge/calls"] >= 16 - row["judge/cached"] and row["reward/errors"] == 0
    before = len(judge.seen)
    ended = jobs.Job(cut, [*words, f"reward.judge.max_calls={CALLS}"]).ended()
    assert ended.code == 1
    assert f"the budget of the judge is used up: {CALLS} calls" in RunFolder(cut).status()["error"]
    assert len(judge.seen) == before + CALLS
    jobs.run(cut, [*words, "ckpt.load_enable=true"])
    assert jobs.digest(cut) == jobs.digest(whole)
    lines = [json.loads(line) for line in (cut / "logs" / "judge.jsonl").read_text().splitlines()]
    keys = [line["key"] for line in lines if line["parts"] is not None]
    assert len({*keys}) == len(keys)  # no verdict was paid for twice
    assert sum(line["tries"] for line in lines) == len(judge.seen) - before
