"""On-policy distillation on the real stack: no reward, and every token's advantage is what the teacher says of it."""

from __future__ import annotations

import json

import jobs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

NO_REWARD = ["reward.rule=null", "eval.dataset=null", "eval.steps=-1"]


def log_probs(folder, ids):
    """Of every token, by transformers; 0 of the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = [model(torch.tensor([row])).logits[0, :-1].log_softmax(-1) for row in ids]
    return np.concatenate(
        [
            [0.0, *row.gather(1, torch.tensor(own[1:])[:, None])[:, 0].tolist()]
            for row, own in zip(rows, ids, strict=True)
        ]
    )


@pytest.mark.proof
def test_a_student_learns_from_its_teacher_without_a_reward(runs, warm, baseline):
    """The student is the warm-started model, the teacher what reinforcement made of it."""
    folder, teacher = runs / "on_policy_distill", baseline / "model"
    words = [f"actor.model_name_or_path={warm}", f"teacher.model_name_or_path={teacher}", "rollout.temperature=1"]
    small = [word for word in jobs.SMALL if not word.startswith("eval.")]
    jobs.run(folder, [*small, *NO_REWARD, "experiment=on_policy_distill", *words, "train.max_steps=2"])
    samples = jobs.rollout(folder, 1)
    mask = jobs.column(samples, "mask", bool)
    gap = log_probs(teacher, [row["ids"] for row in samples]) - log_probs(warm, [row["ids"] for row in samples])
    assert np.abs(gap[mask]).max() > 0.01
    assert jobs.column(samples, "advantages")[mask] == pytest.approx(gap[mask].clip(-10, 10), abs=2e-5)
    assert not jobs.column(samples, "advantages")[~mask].any()
    metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["train/teacher_kl"] == pytest.approx(-gap[mask].mean(), abs=1e-5)
    assert not [name for name in metrics if "reward" in name and not name.startswith("timing/")]
    assert {log.stem for log in (folder / "logs").glob("*.log")} == {"actor-0", "engine-0", "teacher-0"}
    assert (folder / "curves.png").exists()
