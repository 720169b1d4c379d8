"""One whole run of `task=ppo`: what it leaves behind, and that its files agree with each other and with arithmetic."""

from __future__ import annotations

import json
import math

import jobs
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pages import Page
from rlhf_suite.config.declarations.runs import TASKS
from rlhf_suite.tracking.metrics import read_rows

PHASES = ("generation", "reward", "make_experience", "ppo_train", "weight_sync", "step_total")
METRICS = {
    *("train/reward", "train/score", "train/return", "train/group_reward_std"),
    *("train/response_length", "train/total_length", "train/truncated"),
    *("train/kl", "train/kl_coef", "train/logprobs_diff", "train/vllm_kl"),
    *("train/policy_loss", "train/ppo_clip_ratio", "train/ppo_clip_ratio_low", "train/ppo_clip_ratio_high"),
    *("train/ppo_kl", "train/tokens", "perf/tokens_per_s", "perf/actor_memory_gb"),
    *("train/actor_lr", "train/actor_grad_norm", "train/actor_skipped"),
    *("rollout/reward_std", "rollout/num_samples", "rollout/dropped_groups", "rollout/weight_version"),
    *("mismatch/mean", "mismatch/max", "sync/tensors", "sync/read_back", "sync/probe"),
    *(f"timing/{phase}" for phase in PHASES),
}
EVAL_METRICS = {"eval/pass1", "eval/reward", "eval/response_length_mean", "eval/truncated_rate", "eval/num_samples"}
KL_COEF = 0.001  # conf/demo/ppo.yaml
STEPS = (1, 2, 3)
BESIDE = "timing/reward"  # groups are scored while the engines write others


@pytest.fixture(scope="module")
def rows(baseline):
    return jobs.train_rows(baseline)


def test_a_run_says_that_it_is_done(baseline):
    status = json.loads((baseline / "status.json").read_text())
    assert (status["state"], status["last_step"], status["error"]) == ("done", 3, None)
    last = {**jobs.train_rows(baseline)[-1], **jobs.eval_rows(baseline)[-1]}
    assert status["metrics"]["train/reward"] == last["train/reward"]
    assert status["metrics"]["eval/pass1"] == last["eval/pass1"]


def test_it_leaves_a_curve_samples_and_its_configuration(baseline):
    assert (baseline / "curves.png").stat().st_size > 1000
    assert "reverse" in (baseline / "samples.md").read_text()
    assert "reinforce_baseline" in (baseline / "config.yaml").read_text()


def test_its_page_shows_its_samples_token_by_token(baseline):
    pytest.importorskip("plotly", reason="plotly is not installed here: pip install plotly")
    page = Page(baseline / "report.html")
    (run,) = page.runs
    assert run["status"]["state"] == "done" and run["metrics"]["train/reward"][0] == [1, 2, 3]
    samples = run["samples"]
    tokens, prompts = samples["tokens"], page.array(samples["columns"]["prompt"])
    begin, end = page.array(tokens["starts"])[:2]
    prompt = samples["texts"][prompts[page.array(tokens["samples"])[0]]]
    text = "".join(tokens["vocabulary"][number] for number in page.array(tokens["ids"])[begin:end])
    assert text.startswith(prompt) and prompt.startswith("reverse ")
    assert {"advantage", "engine - trainer"} <= tokens["channels"].keys()


def test_there_is_one_row_of_metrics_per_step_with_every_name(baseline, rows):
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row.keys() >= METRICS, METRICS - row.keys()
        phases = [name for name in row if name.startswith("timing/") and name not in ("timing/step_total", BESIDE)]
        assert row["timing/step_total"] == pytest.approx(sum(row[name] for name in phases))
    assert not [row for row in read_rows(baseline / "metrics.jsonl") if "nonfinite" in row]


def test_the_learning_rate_follows_its_schedule_over_all_optimiser_steps(rows):
    """3 rollouts x 2 epochs x 2 batches = 12 optimiser steps, 3 of them warm-up; a row has the mean of its four."""
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 9)) for k in range(9)]
    rates = [1 / 3, 2 / 3, 1.0, *cosine]
    wanted = [1e-3 * np.mean(rates[i : i + 4]) for i in (0, 4, 8)]
    assert [row["train/actor_lr"] for row in rows] == pytest.approx(wanted, rel=1e-6)
    assert wanted[0] == pytest.approx(0.75e-3)


@pytest.mark.parametrize("step", STEPS)
def test_the_tokens_of_a_rollout_agree_with_each_other(baseline, step):
    samples = jobs.rollout(baseline, step)
    assert len(samples) == 16
    assert [(row["group"], row["sample"]) for row in samples] == [(g, s) for g in range(4) for s in range(4)]
    for row in samples:
        owner = np.array(row["owner"])
        fields = ("weight_version", "mask", "engine_log_probs", "old_log_probs", "ref_log_probs", "advantages")
        assert {len(row[name]) for name in fields} == {len(row["ids"])} == {len(owner)}
        assert np.array_equal(row["mask"], owner == 1)
        assert np.array_equal(np.array(row["weight_version"]), np.where(owner == 1, step - 1, -1))
        assert not np.array(row["engine_log_probs"])[owner == 0].any()
        assert (np.array(row["engine_log_probs"])[owner == 1] < 0).all()
        assert not np.array(row["advantages"])[owner == 0].any()
        assert row["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("step", STEPS)
def test_the_ids_of_a_rollout_are_its_text(baseline, warm, step):
    tokenizer = AutoTokenizer.from_pretrained(warm)
    for row in jobs.rollout(baseline, step):
        ids, owner = np.array(row["ids"]), np.array(row["owner"])
        assert tokenizer.decode(ids[owner == 0]) == row["prompt"]
        assert tokenizer.decode(ids[owner == 1], skip_special_tokens=True) == row["response"]
        assert (ids[-1] == tokenizer.eos_token_id) == (row["finish_reason"] == "stop")


def test_rewards_are_those_of_the_rule_and_some_are_right(baseline, rows):
    found = []
    for step, metrics in zip(STEPS, rows, strict=True):
        samples = jobs.rollout(baseline, step)
        rewards = [row["reward"] for row in samples]
        assert rewards == [float(row["response"].strip() == row["label"]) for row in samples]
        assert [row["prompt"].split()[1][::-1] for row in samples] == [row["label"] for row in samples]
        assert metrics["train/reward"] == pytest.approx(np.mean(rewards))
        assert metrics["rollout/weight_version"] == step - 1
        found += rewards
    assert 0 < np.mean(found) < 1


@pytest.mark.parametrize("step", STEPS)
def test_advantages_are_those_of_the_formula(baseline, rows, step):
    """Reward less its group's mean at the last token, minus beta k1 at each token, summed to the end, whitened."""
    samples = jobs.rollout(baseline, step)
    rewards = np.array([row["reward"] for row in samples])
    means = rewards.reshape(4, 4).mean(1).repeat(4)
    to_go = []
    for row, centred in zip(samples, rewards - means, strict=True):
        chosen = np.array(row["mask"], bool)
        token = -KL_COEF * (np.array(row["old_log_probs"]) - np.array(row["ref_log_probs"]))[chosen]
        token[-1] += centred
        to_go.append(token[::-1].cumsum()[::-1])
    flat = np.concatenate(to_go)
    wanted = (flat - flat.mean()) / np.sqrt(max(flat.var(), 1e-8))
    got = jobs.column(samples, "advantages")[jobs.column(samples, "mask", bool)]
    assert np.allclose(got, wanted, atol=2e-5)
    kl = (jobs.column(samples, "old_log_probs") - jobs.column(samples, "ref_log_probs"))[
        jobs.column(samples, "mask", bool)
    ]
    assert rows[step - 1]["train/kl"] == pytest.approx(kl.mean(), abs=1e-6)
    assert (abs(rows[step - 1]["train/kl"]) > 1e-3) == (step > 1)  # the policy has left its reference after one step


def test_engine_and_trainer_agree_at_every_step(baseline, rows):
    for step, row in zip(STEPS, rows, strict=True):
        samples = jobs.rollout(baseline, step)
        chosen = jobs.column(samples, "mask", bool)
        difference = np.abs(jobs.column(samples, "engine_log_probs") - jobs.column(samples, "old_log_probs"))[chosen]
        assert row["mismatch/mean"] == pytest.approx(difference.mean(), rel=1e-3)
        assert row["mismatch/mean"] < 1e-6
        assert row["sync/probe"] < 3e-6  # of every token, prompts too: the unlikely ones have larger errors
        assert row["sync/read_back"] == row["sync/tensors"] > 0


def test_evaluations_are_on_record_before_and_after(baseline):
    rows = jobs.eval_rows(baseline)
    assert [row["step"] for row in rows] == [0, 3]
    for row in rows:
        samples = pq.read_table(baseline / "evaluations" / f"step_{row['step']:06d}.parquet").to_pylist()
        assert row.keys() >= EVAL_METRICS
        measured = {name.removeprefix("eval/") for name in row if name.startswith("eval/")}
        assert measured <= {*TASKS["ppo"].evaluated, "pass2", "pass4"}
        assert len(samples) == row["eval/num_samples"] == 8
        assert row["eval/pass1"] == np.mean([sample["score"] > 0.5 for sample in samples])


def test_the_final_model_answers_as_the_engine_did(baseline):
    """transformers, greedy, on the saved folder; the engine's last evaluation was greedy."""
    samples = pq.read_table(baseline / "evaluations" / "step_000003.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(baseline / "model")
    model = AutoModelForCausalLM.from_pretrained(baseline / "model", dtype=torch.float32).eval()
    for row in samples:
        prompt = tokenizer(row["prompt"], return_tensors="pt").input_ids
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16)
        assert tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True) == row["response"]
    start = AutoModelForCausalLM.from_pretrained(baseline.parent / "warm", dtype=torch.float32)
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert min(moved) > 0  # every tensor was trained
