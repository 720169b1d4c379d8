"""Where a reward may come from, on the real stack: a user's file that fails at times, a server, and a reward model and
a judge of steps with a rule and a file beside them."""

from __future__ import annotations

import json
import shutil

import httpx
import jobs
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from plain_judge import PlainJudge
from rlhf_suite.data.builtin import rows
from rlhf_suite.polling import poll_until

# The share of right digits. It fails for one sample of a group: the one whose prompt and answer it finds unlucky.
REWARD_FILE = """
def reward_func(queries, prompts, labels):
    found = []
    for query, prompt, label in zip(queries, prompts, labels):
        assert query.startswith(prompt)
        answer = query[len(prompt):].split("<|im_end|>")[0].strip()
        if label[0] in "13579" and answer[:1] == label[0]:
            raise ValueError(f"no opinion about {label}")
        found.append(sum(a == b for a, b in zip(answer, label)) / 4)
    return {"rewards": [2 * x for x in found], "scores": found, "extra_logs": {"right_digits": [4 * x for x in found]}}
"""
MEAN, STD = jobs.REWARD_MEAN, jobs.REWARD_STD
ALONE = ("algo.advantage.estimator=reinforce", "algo.kl.init_coef=0")  # the policy without a reference


@pytest.fixture(scope="module")
def reward_file(runs):
    path = runs / "reward.py"
    path.write_text(REWARD_FILE)
    return path


@pytest.fixture
def words(warm):
    return [
        *(word for word in jobs.SMALL if not word.startswith("rollout.batch_size")),
        "rollout.batch_size=8",
        f"actor.model_name_or_path={warm}",
        "train.max_steps=2",
        "eval.steps=2",
        "reward.rule=null",
    ]


@pytest.mark.proof
def test_a_file_scores_and_the_groups_of_samples_it_fails_for_are_dropped_and_counted(runs, words, reward_file):
    folder = runs / "dropped"
    source = [
        f"reward.remote_url={reward_file}",
        "reward.on_error=drop",
        "reward.max_error_rate=1.0",
        "reward.num_retries=1",
        "algo.advantage.estimator=rloo",
    ]
    jobs.run(folder, [*words, *source])
    dropped = []
    for step, row in enumerate(jobs.train_rows(folder), 1):
        samples = jobs.rollout(folder, step)
        groups = {sample["group"] for sample in samples}
        dropped.append(row["rollout/dropped_groups"])
        assert len(groups) + dropped[-1] == 8
        assert len(samples) == row["rollout/num_samples"] == 4 * len(groups)  # whole groups only
        assert not [s for s in samples if s["label"][0] in "13579" and s["response"][:1] == s["label"][0]]
        right = [sum(a == b for a, b in zip(s["response"].strip(), s["label"], strict=False)) for s in samples]
        assert [s["reward"] for s in samples] == [digits / 2 for digits in right]
        assert [s["score"] for s in samples] == [digits / 4 for digits in right]
        assert row["reward/right_digits"] == pytest.approx(np.mean(right))
        assert row["train/reward"] == pytest.approx(2 * row["train/score"])
        leave_one_out(samples)
        assert row["reward/retries"] == row["reward/errors"] >= dropped[-1] and row["reward/timeouts"] == 0
        assert {sample["reward_retries"] for sample in samples} == {0}
    assert sum(dropped) > 0
    failures = [json.loads(line) for line in (folder / "logs" / "reward_failures.jsonl").read_text().splitlines()]
    assert len(failures) >= sum(row["reward/errors"] for row in jobs.train_rows(folder))  # and those of evaluations
    for each in failures:
        assert each["label"][0] in "13579" and each["response"][:1] == each["label"][0]
        assert f"no opinion about {each['label']}" in each["reason"] and each["retries"] == 1


def leave_one_out(samples):
    """RLOO at the last token of a response, KL aside: the reward less the mean of the group's other three."""
    rewards = np.array([sample["reward"] for sample in samples]).reshape(-1, 4)
    wanted = (rewards - (rewards.sum(1, keepdims=True) - rewards) / 3).ravel()
    last = [sample["advantages"][-1] for sample in samples]
    kl = [0.001 * (sample["old_log_probs"][-1] - sample["ref_log_probs"][-1]) for sample in samples]
    assert last == pytest.approx(wanted - kl, abs=1e-5)


# The reason is shown in tests/rl/test_scoring.py, and the end of a run that fails in test_corrupted_sync.py.
@pytest.mark.proof
def test_a_file_that_fails_for_a_sample_ends_the_run_with_its_reason(runs, words, reward_file):
    folder = runs / "stopped"
    ended = jobs.run(folder, [*words, *ALONE, f"reward.remote_url={reward_file}"], expect=1)
    last = ended.err.splitlines()[-1]
    assert "reward.py:8: ValueError: no opinion about" in last
    assert "reward.on_error=drop" in last
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed"
    assert "no opinion about" in status["error"]


@pytest.fixture(scope="module")
def mixed(runs):
    """Prompts of two sources: `odd` and `even`, by the label's first digit."""
    path = runs / "mixed.jsonl"
    with path.open("w") as file:
        for row in rows("builtin:reverse", ""):
            datasource = "odd" if row["label"][0] in "13579" else "even"
            file.write(json.dumps(row | {"datasource": datasource}) + "\n")
    return path


WEIGHTS = {"model": 0.5, "other": 0.75, "right": 1.0, "digits": 0.25, "steps": 0.125}


@pytest.mark.proof
def test_rules_files_models_and_judges_of_steps_add_up_by_weight_where_they_score(
    runs, words, reward_model, other_reward_model, judge, mixed
):
    """The scores of two reward models are standardised, and the sum is clipped; all is recomputed from the samples."""
    folder, file = runs / "reward_model_run", runs / "digits.py"
    file.write_text(REWARD_FILE.replace('label[0] in "13579"', "False"))
    sources = (
        f"reward.sources={{model: {{model_name_or_path: {reward_model}, weight: 0.5}}, "
        f"other: {{model_name_or_path: {other_reward_model}, weight: 0.75}}, "
        f"right: {{rule: exact_match, datasets: [odd]}}, steps: {{process: true, weight: 0.125}}, "
        f"digits: {{remote_url: {file}, weight: 0.25, datasets: [even]}}}}"
    )
    process = [f"reward.process.model_name_or_path={judge}", "reward.process.num_gpus_per_node=2"]
    jobs.run(
        folder,
        [
            *(*words, *process, "reward.process.enable=true"),
            *(sources, "reward.normalize_enable=true", "reward.clip_range=[-1,1]", f"data.prompt_dataset={mixed}"),
            *("algo.advantage.estimator=group_norm", "algo.kl.use_loss=true", "algo.kl.estimator=k3"),
        ],
    )
    models = {"model": plain_model(reward_model), "other": plain_model(other_reward_model)}
    plain, rewards = PlainJudge(judge), []
    for step, metrics in enumerate(jobs.train_rows(folder), 1):
        samples = jobs.rollout(folder, step)
        steps = [plain.scores(row["prompt"], row["response"]) for row in samples]
        every_step_is_judged(steps, samples, metrics)
        found = [told(models, *each) for each in zip(samples, steps, strict=True)]
        for row, one in zip(samples, found, strict=True):
            assert row["datasource"] == ("odd" if row["label"][0] in "13579" else "even")
            total = sum(WEIGHTS[name] * reward for name, (reward, _) in one.items())
            assert row["reward"] == pytest.approx(min(max(total, -1), 1), abs=1e-4)
            mean = sum(WEIGHTS[name] * score for name, (_, score) in one.items()) / sum(WEIGHTS[name] for name in one)
            assert row["score"] == pytest.approx(mean, abs=1e-5)
            assert all(row[f"reward/{name}/mean"] == pytest.approx(one[name][0], abs=1e-4) for name in one)
        assert metrics["train/reward"] == pytest.approx(np.mean([row["reward"] for row in samples]), abs=1e-5)
        for name in WEIGHTS:
            of_source = [one[name][0] for one in found if name in one]
            assert metrics[f"reward/{name}/mean"] == pytest.approx(np.mean(of_source), abs=1e-4)
            assert (metrics[f"reward/{name}/rows"], metrics[f"reward/{name}/errors"]) == (len(of_source), 0)
        for name in ("odd", "even"):
            part = [row["reward"] for row in samples if row["datasource"] == name]
            assert metrics[f"train/{name}/reward"] == pytest.approx(np.mean(part), abs=1e-5)
        assert metrics["reward/digits/right_digits"] == pytest.approx(
            np.mean([4 * one["digits"][1] for one in found if "digits" in one])
        )
        rewards += [row["reward"] for row in samples]
    assert -1 in rewards or 1 in rewards
    assert any(-1 < reward < 1 for reward in rewards)
    group_deviations(jobs.rollout(folder, 1))
    assert jobs.train_rows(folder)[1]["train/kl_loss"] > 0
    assert {log.stem for log in (folder / "logs").glob("reward*.log")} == {
        *("reward", "reward.process-0", "reward.process-1", "reward.sources.model-0", "reward.sources.other-0")
    }


def every_step_is_judged(steps, samples, metrics):
    """The reward of the judge is the least step of a response; every character is a step."""
    assert [len(each) for each in steps] == [len(row["response"].replace(" ", "")) for row in samples]
    least = [min(each, default=0) for each in steps]
    assert [row["reward/steps/mean"] for row in samples] == pytest.approx(least, abs=1e-5)
    assert np.std(least) > 0
    assert metrics["reward/steps/num_steps"] == pytest.approx(np.mean([len(each) for each in steps]))
    means = [np.mean(each) if each else 0 for each in steps]
    assert metrics["reward/steps/step_mean"] == pytest.approx(np.mean(means), abs=1e-5)


def plain_model(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


def told(models, row, steps):
    """(reward, score) by each source of a sample."""
    with torch.no_grad():
        scores = {name: float(model(torch.tensor([row["ids"]])).logits) for name, model in models.items()}
    response = row["response"].strip()
    share = sum(a == b for a, b in zip(response, row["label"], strict=False)) / 4
    right = float(response == row["label"])
    own = {"right": (right, right)} if row["datasource"] == "odd" else {"digits": (2 * share, share)}
    least = min(steps, default=0)
    judged = {name: ((score - MEAN) / STD, score) for name, score in scores.items()}
    return judged | {"steps": (least, least)} | own


def group_deviations(samples):
    """GRPO's advantage, one number per response: the reward standardised in its group by the unbiased deviation."""
    rewards = np.array([sample["reward"] for sample in samples]).reshape(-1, 4)
    wanted = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-9)
    for sample, advantage in zip(samples, wanted.ravel(), strict=True):
        got = np.array(sample["advantages"])[np.array(sample["mask"], bool)]
        assert got == pytest.approx(np.full(len(got), advantage), abs=1e-4)


def test_a_reward_model_without_constants_cannot_be_standardised(runs, words, reward_model):
    bare = runs / "bare_reward_model"
    shutil.copytree(reward_model, bare)
    config = json.loads((bare / "config.json").read_text())
    del config["reward_mean"], config["reward_std"]
    (bare / "config.json").write_text(json.dumps(config))
    source = [f"reward.model_name_or_path={bare}", "reward.normalize_enable=true"]
    estimator = "algo.advantage.estimator=reinforce"
    ended = jobs.run(runs / "refused", [*words, *source, estimator], expect=2)
    assert "reward.normalize_enable=true" in ended.err
    assert str(bare) in ended.err
    assert not (runs / "refused" / "logs").exists()  # before any actor was started


@pytest.mark.proof
def test_a_served_reward_model_scores_a_run_over_http(runs, words, reward_model, monkeypatch):
    """As if it sat beside the policy; and the server ends as something done when it is told to."""
    monkeypatch.setenv("RLHF_SUITE_REWARD_TOKEN", "s3cret")
    serving = ["task=serve_rm", f"reward.model_name_or_path={reward_model}", "serve.port=0", "serve.batch_size=8"]
    server = jobs.Job(runs / "server", [*serving, "reward.normalize_enable=true", "ds.param_dtype=fp32"])
    url = address(server)
    folder = runs / "remote"
    source = [f"reward.remote_url={url}", "reward.http.batch_size=5", "train.max_steps=1", "eval.steps=1"]
    jobs.run(folder, [*words, *ALONE, *source])
    refused = httpx.post(url, json={"query": ["a"]}, trust_env=False)
    assert refused.status_code == 401
    headers = {"Authorization": "Bearer s3cret"}
    answer = httpx.post(url, json={"query": ["a", "b" * 9999]}, headers=headers, trust_env=False).json()
    assert answer["rewards"][1] is None and "serve.max_len=4096" in answer["errors"][1]
    server.process.terminate()
    ended = server.ended(60)
    assert ended.code == 0, ended.err
    status = json.loads((runs / "server" / "status.json").read_text())
    model = plain_model(reward_model)
    samples = jobs.rollout(folder, 1)
    for row in samples:
        with torch.no_grad():
            score = float(model(torch.tensor([row["ids"]])).logits)
        assert row["score"] == pytest.approx((score - MEAN) / STD, abs=1e-4)
    assert status["state"] == "done"
    assert status["metrics"]["serve/texts"] == len(samples) + 2 * 8 + 1  # of the step, two evaluations, and ours
    assert "s3cret" not in "".join(file.read_text() for file in (runs / "server").rglob("*.*") if file.is_file())


def address(server: jobs.Job) -> str:
    """Where a server listens, once it does."""
    file = server.folder.path / "server.json"
    assert poll_until(lambda: file.exists() or server.process.poll() is not None, 120), server.text()
    assert server.process.poll() is None, server.text()
    return json.loads(file.read_text())["url"]
