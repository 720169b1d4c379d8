"""A whole RL run in one process, four steps of it: which weights write, what is learned from, and how it goes on
after a stop. The numbers are worked out again from the files that the run leaves."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from plain_run import run, small

from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.errors import RunError
from rlhf_suite.rl.pipeline import Pipeline, staleness
from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.stack

STEPS = 4
EVALUATION = {
    "eval__dataset": "builtin:reverse_eval",
    "eval__steps": 3,
    "eval__max_samples": 2,
    "eval__n_samples_per_prompt": 2,
}
FLAGS = {"train__num_episodes": 2, "ckpt__save_steps": 2, "ckpt__load_enable": True, **EVALUATION}


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """The folder of an undisturbed run of all steps: two passes over four prompts, two of them a step."""
    folder = tmp_path_factory.mktemp("whole")
    ranks(1).call(run, folder, small(**FLAGS))
    return folder


@pytest.fixture(scope="module")
def rows(whole):
    """Metrics of the steps."""
    return [row for row in read_rows(whole / "metrics.jsonl") if "train/reward" in row]


def rollout(folder, step):
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


@pytest.mark.notices(
    "a resumed RL run leaves a step out",
    "train/loop.py",
    "in range(start, self.total_steps)",
    "in range(start + 1, self.total_steps)",
)
@pytest.mark.notices(
    "one pass over the prompts whatever the flag says",
    "rl/pipeline.py",
    "order.steps_per_epoch * train.num_episodes",
    "order.steps_per_epoch",
)
def test_the_run_has_as_many_steps_as_its_episodes_have_batches(rows):
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.notices(
    "weights are published with the version of the step before",
    "rl/pipeline.py",
    "self.engines.start(step + 1, experience)",
    "self.engines.start(step, experience)",
)
def test_every_token_of_a_step_is_of_the_weights_that_the_step_before_published(whole):
    for step in range(1, STEPS + 1):
        for sample in rollout(whole, step):
            assert {
                version for version, owner in zip(sample["weight_version"], sample["owner"], strict=True) if owner
            } == {step - 1}


def test_engine_and_policy_agree_on_samples_of_another_temperature_than_1(whole):
    for sample in rollout(whole, 3):
        chosen = [i for i, mask in enumerate(sample["mask"]) if mask]
        engine, policy = ([sample[name][i] for i in chosen] for name in ("engine_log_probs", "old_log_probs"))
        assert policy == pytest.approx(engine, abs=1e-4) and min(engine) < -0.1


def test_a_response_that_is_cut_off_has_half_of_its_score(whole):
    samples = [sample for step in range(1, STEPS + 1) for sample in rollout(whole, step)]
    for sample in samples:
        share = 0.5 if sample["finish_reason"] == "length" else 1.0
        assert sample["score"] == pytest.approx(min(1.0, max(0.0, 2 - len(sample["response"]) / 4)))
        assert sample["reward"] == pytest.approx(share * sample["score"])
    assert len({sample["reward"] for sample in samples}) > 1


def test_advantages_are_rewards_against_the_others_of_the_group_less_the_kl_to_come(whole, rows):
    """RLOO with k1 in the reward, worked out from the files of a step."""
    differences = []
    for step in range(1, STEPS + 1):
        samples, beta = rollout(whole, step), rows[step - 1]["train/kl_coef"]
        for sample in samples:
            (other,) = (s for s in samples if s["group"] == sample["group"] and s["sample"] != sample["sample"])
            differences.append(abs(sample["reward"] - other["reward"]))
            to_come, wanted = 0.0, []
            for mask, old, reference in zip(
                *(sample[n][::-1] for n in ("mask", "old_log_probs", "ref_log_probs")), strict=True
            ):
                to_come += mask * (old - reference)
                wanted.append(mask * (sample["reward"] - other["reward"] - beta * to_come))
            assert sample["advantages"] == pytest.approx(wanted[::-1], abs=1e-5)
    assert max(differences) > 0.1


@pytest.mark.notices(
    "the KL controller sees one sample per step",
    "rl/pipeline.py",
    "self.credit.adapt(credit_metrics, experience.num_episodes)",
    "self.credit.adapt(credit_metrics, 1)",
)
def test_the_kl_controller_learns_from_the_samples_of_a_step(rows):
    """beta <- beta (1 + clip(KL / 0.5 - 1, -0.2, 0.2) 4 / 100), for the next step."""
    beta = 0.1
    for row in rows:
        assert row["train/kl_coef"] == pytest.approx(beta)
        beta *= 1 + min(max(row["train/kl"] / 0.5 - 1, -0.2), 0.2) * 4 / 100
    assert rows[0]["train/kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["train/kl"] != 0


def test_the_learning_rate_falls_to_the_end_of_the_run(rows):
    assert [row["train/actor_lr"] for row in rows] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


@pytest.mark.parametrize(("interval", "expected"), [(-1, [0, 4]), (3, [0, 3, 4])])
def test_without_an_interval_only_the_first_and_the_last_weights_are_evaluated(interval, expected):
    pipeline = Pipeline.__new__(Pipeline)
    pipeline.evaluator, pipeline.evaluation, pipeline.total_steps = object(), EvalConfig.of("ppo", steps=interval), 4
    assert [step for step in range(5) if pipeline.is_evaluated(step)] == expected
    pipeline.evaluator = None
    assert not any(map(pipeline.is_evaluated, range(5)))


@pytest.mark.notices(
    "the last RL step is not evaluated",
    "train/loop.py",
    "step in (self.total_steps, self.evaluated_beside_plan)",
    "step == self.evaluated_beside_plan",
)
def test_it_is_evaluated_before_the_first_step_every_third_and_after_the_last(whole):
    found = {row["step"]: row["eval/pass1"] for row in read_rows(whole / "metrics.jsonl") if "eval/pass1" in row}
    assert list(found) == [0, 3, 4]
    for step, share in found.items():
        samples = pq.read_table(whole / "evaluations" / f"step_{step:06d}.parquet").to_pylist()
        assert share == pytest.approx(sum(sample["score"] > 0.5 for sample in samples) / 4)


@pytest.mark.notices(
    "the probe of a sync is left out",
    "rl/weight_sync.py",
    'self.config.sync_check != "full"',
    'self.config.sync_check != "off"',
)
def test_every_sync_is_probed(rows):
    assert all(0 < row["sync/probe"] < 1e-5 for row in rows)


def deaf_run(world, folder, config) -> str:
    """Why a run ends whose engine does not load the weights that it is given."""
    try:
        run(world, folder, config, is_deaf=True)
    except RunError as error:
        return str(error)
    return "it did not end"


def test_an_engine_that_holds_on_to_old_weights_ends_the_run(ranks, tmp_path):
    """The digests of what it received are right: the probe alone can tell."""
    (said,) = ranks(1).call(deaf_run, tmp_path, small(train__num_episodes=2, actor__adam__lr=0.05))
    assert re.match(
        r"sync of version \d: all tensors arrived, but an engine's log-probs differ from the trainer's", said
    )


@pytest.mark.notices(
    "after a resume the versions of weights begin anew", "rl/pipeline.py", "first(version=start)", "first(version=0)"
)
@pytest.mark.notices(
    "an RL checkpoint has the number of the step before",
    "train/loop.py",
    "self.save(step + 1, evaluation)",
    "self.save(step, evaluation)",
)
@pytest.mark.notices(
    "a resume removes the rollout of the last step",
    "rl/rollout_file.py",
    "if number > step:",
    "if number >= step:",
)
def test_a_run_that_was_stopped_takes_the_same_steps_as_an_undisturbed_one(ranks, whole, rows, tmp_path):
    """From the checkpoint of step 2 on: the same samples, weights and coefficients, and every step once on record."""
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    for later in (again / "checkpoints" / "step_000004", *again.glob("checkpoints/best_*"), again / "model"):
        shutil.rmtree(later)
    ranks(1).call(run, again, small(**FLAGS))
    everything = read_rows(again / "metrics.jsonl")
    assert [row["step"] for row in everything] == [row["step"] for row in read_rows(whole / "metrics.jsonl")]
    for mine, theirs in zip([row for row in everything if "train/reward" in row], rows, strict=True):
        for name, value in theirs.items():
            if not name.startswith(("time", "timing/", "perf/")):
                assert mine[name] == value or (math.isnan(mine[name]) and math.isnan(value)), (mine["step"], name)
    for step in range(1, STEPS + 1):
        assert rollout(again, step) == rollout(whole, step)


def test_the_versions_of_a_ledger_are_counted_ledger_by_ledger():
    draw, version, seen = np.random.default_rng(0), 3, set()
    for _ in range(100):
        lengths = draw.integers(1, 9, draw.integers(1, 6))
        masks = [draw.integers(0, 2, length) for length in lengths]
        versions = [np.sort(draw.integers(0, version + 1, length)) for length in lengths]
        mask, written = torch.tensor(np.concatenate(masks)).float(), torch.tensor(np.concatenate(versions)).int()
        batch = Experience(torch.zeros(len(mask), dtype=torch.int64), torch.tensor(lengths), mask)
        found = staleness(replace(batch, weight_version=torch.where(mask > 0, written, -1)), version)
        each = [
            len({*of_ledger[chosen > 0]}) for of_ledger, chosen in zip(versions, masks, strict=True) if chosen.any()
        ]
        assert found.get("async/versions_per_ledger") == (pytest.approx(sum(each) / len(each)) if each else None)
        seen.update(each)
    assert seen >= {1, 2, 3}
