"""A process reward model in RL: trained by task=prm, then every response is scored step by step, on the real stack."""

from __future__ import annotations

import jobs
import numpy as np
import pytest

from plain_judge import PlainJudge


def test_the_reward_is_the_least_step_of_the_response(runs, warm, judge):
    folder = runs / "process_reward"
    words = ["reward=prm", f"reward.process.model_name_or_path={judge}", "reward.process.num_gpus_per_node=2"]
    small = [*jobs.SMALL, f"actor.model_name_or_path={warm}", "algo.advantage.estimator=rloo"]
    jobs.run(folder, [*small, *words, "train.max_steps=1", "eval.steps=1"])
    samples, (metrics,) = jobs.rollout(folder, 1), jobs.train_rows(folder)
    plain = PlainJudge(judge)
    steps = [plain.scores(row["prompt"], row["response"]) for row in samples]
    assert [row["reward"] for row in samples] == pytest.approx([min(each, default=0) for each in steps], abs=1e-5)
    assert np.std([row["reward"] for row in samples]) > 0
    assert [len(each) for each in steps] == [len(row["response"].replace(" ", "")) for row in samples]
    assert metrics["reward/num_steps"] == pytest.approx(np.mean([len(each) for each in steps]))
    means = [np.mean(each) if each else 0 for each in steps]
    assert metrics["reward/step_mean"] == pytest.approx(np.mean(means), abs=1e-5)
    assert {log.stem for log in (folder / "logs").glob("reward*.log")} >= {"reward.process-0", "reward.process-1"}
