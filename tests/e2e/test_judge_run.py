"""A whole run whose responses a judge scores: its budget ends it, and its continuation pays for nothing twice."""

from __future__ import annotations

import json
import re

import jobs
import pytest

from judge_server import JudgeServer, completion, quoted, verdict
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
            verdict_of = json.loads(sample["reward/reason"].splitlines()[-1].split(" ", 2)[2])
            assert verdict_of == judged(sample["response"])
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


def rank_by_variety(body):
    """A judge to whom answers with more different characters are better; one with less of them is not."""
    number = re.search(r"^RANKING (\w+) ", body["messages"][0]["content"], re.MULTILINE)[1]
    text = body["messages"][1]["content"]
    shown = re.findall(rf"^BEGIN {number} \d+\n(.*?)\nEND {number} \d+$", text, re.DOTALL | re.MULTILINE)
    order = sorted(range(1, len(shown) + 1), key=lambda place: (variety(shown[place - 1]), shown[place - 1]))
    return 200, completion(f"RANKING {number} {json.dumps(order[::-1])}")


def variety(response: str) -> int:
    return len(set(response))


@pytest.mark.proof
def test_a_run_is_trained_on_ranks_while_groups_are_a_stream_and_resumes_without_asking_again(runs, warm, tmp_path):
    """Groups are written by several weights, and scored as they end."""
    server = JudgeServer(rank_by_variety)
    (tmp_path / "rubric.md").write_text("{prompt}\n{response}\n")
    words = [
        *(word for word in jobs.SMALL if not word.startswith("eval.")),
        *("eval.dataset=null", "eval.steps=-1", f"actor.model_name_or_path={warm}", "reward.rule=null"),
        *(f"reward.rubric={tmp_path / 'rubric.md'}", f"reward.judge.url={server.base}", "reward.judge.model=scripted"),
        *("reward.judge.mode=rank", "reward.judge.both_orders=true", "algo.advantage.estimator=group_norm"),
        *("algo.kl.init_coef=0", "correction=tis", "train.async_enable=true", *jobs.STREAM, "ckpt.save_steps=1"),
    ]
    folder = runs / "ranked"
    words.append("train.max_steps=4")
    jobs.run(folder, [*words, "reward.judge.max_calls=17"], expect=1)
    assert "the budget of the judge is used up: 17 calls" in RunFolder(folder).status()["error"]
    jobs.run(folder, [*words, "ckpt.load_enable=true"])
    server.close()
    for step, metrics in enumerate(jobs.train_rows(folder), 1):
        rows = jobs.rollout(folder, step)
        for group in {row["group"] for row in rows}:
            answers = {row["response"]: row["reward"] for row in rows if row["group"] == group}
            order = sorted(answers, key=lambda answer: (variety(answer), answer))
            places = [0.5] if len(order) == 1 else [place / (len(order) - 1) for place in range(len(order))]
            assert [answers[answer] for answer in order] == pytest.approx(places)
        assert metrics.get("judge/pairs_reversed", 0) == 0
    lines = [json.loads(line) for line in (folder / "logs" / "judge.jsonl").read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines) == len(server.seen)


@pytest.mark.proof
def test_a_judge_that_is_down_for_a_while_costs_a_run_groups_and_not_its_end(runs, warm, tmp_path):
    down = range(22, 28)  # requests, all tries of some answers of the second step

    def answer(body):
        return (503, b"down") if len(server.seen) in down else verdict(body, **judged(quoted(body)[1]))

    server = JudgeServer(answer)
    (tmp_path / "rubric.md").write_text(RUBRIC)
    words = [
        *(word for word in jobs.SMALL if not word.startswith("eval.")),
        *("eval.dataset=null", "eval.steps=-1", "train.max_steps=4", f"actor.model_name_or_path={warm}"),
        *("reward.rule=null", f"reward.rubric={tmp_path / 'rubric.md'}", f"reward.judge.url={server.base}"),
        *("reward.judge.model=scripted", "reward.http.num_retries=2", "reward.http.concurrency=1"),
        *("reward.on_error=drop", "reward.max_error_rate=0.9", "algo.kl.init_coef=0"),
    ]
    folder = runs / "judge_was_down"
    jobs.run(folder, words)
    server.close()
    rows = jobs.train_rows(folder)
    assert len(rows) == 4 and sum(row["reward/errors"] for row in rows) > 0
    reasons = [
        json.loads(line)["reason"] for line in (folder / "logs" / "reward_failures.jsonl").read_text().splitlines()
    ]
    assert all("no server of reward.judge.url answers" in reason for reason in reasons)
