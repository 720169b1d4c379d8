"""Episodes with roles, trained on: baselines by role against formulas in float64, optimiser steps, and a whole run."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from plain_run import run
from test_agents_in_runs import settings
from test_forked_episodes import ledger, scored

from rlhf_suite.config.declarations.algo import AdvantageConfig, AlgoConfig, KLConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.trajectory import MODEL, Trajectory, group_numbers, to_batch
from rlhf_suite.rl.credit import CreditAssigner
from rlhf_suite.rl.evaluation import by_source
from rlhf_suite.rl.filtering import Filters
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.sample_table import read_samples, write_samples
from rlhf_suite.rl.samples import join_groups
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.rl.update import step_indices
from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.stack

ROLES = ("first", "second")


def part(role: str, tokens: int, group: int = 0, sample: int = 0, fork: int = 0) -> Trajectory:
    return replace(ledger([40], list(range(50, 50 + tokens)), group=group, sample=sample, fork=fork), role=role)


def games(draw: np.random.Generator, groups: int = 3, samples: int = 4) -> tuple[list[Trajectory], np.ndarray]:
    """Games whose roles have other rewards, lengths and numbers of ledgers; in some the second does not speak."""
    ledgers, rewards = [], []
    for group in range(groups):
        for sample in range(samples):
            for number, role in enumerate(ROLES):
                if number and (group, sample) == (1, 2):
                    continue
                reward = np.float32(draw.normal(10.0 * number - group, 1 + number))
                for fork in range(int(draw.integers(1, 3)) if number else 1):
                    ledgers.append(part(role, int(draw.integers(1, 6)), group, sample, fork))
                    rewards.append(reward)
    return ledgers, np.array(rewards, np.float32)


def exact(ledgers: list[Trajectory], rewards: np.ndarray, name: str) -> np.ndarray:
    """The advantage of each token in float64, by the formulas of the papers, for each role by itself."""
    units: dict[tuple[str, int, int], list[int]] = {}
    for row, t in enumerate(ledgers):
        units.setdefault((t.role, t.group, t.sample), []).append(row)
    result = np.zeros(len(ledgers))
    for (role, group, _), rows in units.items():
        peers = [own for (of, at, _), own in units.items() if of == role and (at == group or name == "flash_reinforce")]
        values = np.array([float(rewards[own[0]]) for own in peers])
        lengths = np.array([sum(ledgers[row].response_length for row in own) for own in peers])
        own = float(rewards[rows[0]])
        others = (values.sum() - own) / (len(values) - 1)
        result[rows] = {
            "rloo": own - others,
            "group_norm": (own - values.mean()) / (values.std(ddof=1) + 1e-9),
            "dr_grpo": own - values.mean(),
            "reinforce_baseline": own - values.mean(),
            "flash_reinforce": own - values.mean(),
            "opo": own - (values * lengths).sum() / lengths.sum(),
        }[name]
    lengths = [t.response_length for t in ledgers]
    tokens, roles = np.repeat(result, lengths), np.repeat([t.role for t in ledgers], lengths)
    if name == "reinforce_baseline":
        for role in ROLES:
            own = tokens[roles == role]
            tokens[roles == role] = (own - own.mean()) / own.std()
    return tokens


@pytest.mark.notices(
    "a baseline mixes the roles of a prompt",
    "data/trajectory.py",
    "t.group * len(roles) + roles.index(t.role)",
    "t.group",
)
@pytest.mark.notices(
    "advantages are whitened over all roles together",
    "algo/advantage.py",
    "roles_of(inputs).repeat_interleave(inputs.lengths)",
    "torch.zeros_like(inputs.groups).repeat_interleave(inputs.lengths)",
)
@pytest.mark.notices(
    "the mean of a rollout mixes its roles",
    "algo/advantage.py",
    "return torch.zeros_like(inputs.groups) if inputs.roles is None else inputs.roles",
    "return torch.zeros_like(inputs.groups)",
)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["rloo", "group_norm", "dr_grpo", "reinforce_baseline", "flash_reinforce", "opo"])
def test_baselines_are_those_of_a_role(name, seed, record_property):
    ledgers, rewards = games(np.random.default_rng(seed))
    batch = replace(to_batch(ledgers), reward=torch.from_numpy(rewards))
    config = AlgoConfig.of("ppo", advantage=AdvantageConfig(estimator=name), kl=KLConfig(init_coef=0.0))
    found = CreditAssigner(config).assign(batch)[0].advantages[batch.mask.bool()].double().numpy()
    wanted = exact(ledgers, rewards, name)
    error = float(np.abs(found - wanted).max())
    record_property("largest difference of advantages", error)
    assert error < 2e-5 and np.abs(wanted).max() > 0.5


def test_without_roles_a_batch_is_as_it_was():
    ledgers = [part("", 3, group, sample) for group in range(2) for sample in range(2)]
    batch = to_batch(ledgers)
    assert batch.role is None and batch.game is None and batch.group.tolist() == [0, 0, 1, 1]
    assert group_numbers(ledgers).tolist() == [0, 0, 1, 1] and batch.num_games == 4


def test_an_optimiser_step_has_whole_games_and_roles_make_no_further_steps():
    """A rollout of one optimiser step has one with roles too: the policy must not move before the second role."""
    ledgers, rewards = games(np.random.default_rng(0))
    batch = replace(to_batch(ledgers), reward=torch.from_numpy(rewards))
    for size in (12, 5):
        steps = [batch.ledgers_of(chosen) for chosen in step_indices(batch.num_games, size, 1, (0, 0))]
        assert len(steps) == -(-12 // size) and sorted(chain.from_iterable(steps)) == list(range(len(ledgers)))
        owners = [{(ledgers[row].group, ledgers[row].sample) for row in step} for step in steps]
        assert sum(map(len, owners)) == len(set.union(*owners)) == 12


def test_metrics_and_evaluations_tell_roles_apart():
    ledgers = [
        part(role, tokens, sample=sample) for sample in range(2) for role, tokens in zip(ROLES, (2, 5), strict=True)
    ]
    found = scored(ledgers, [1.0, -1.0, 0.5, -0.5])
    metrics = sample_metrics(found)
    assert (metrics["train/first/reward"], metrics["train/second/reward"]) == (0.75, -0.75)
    assert metrics["train/second/response_length"] == 5 and metrics["train/reward"] == 0
    assert metrics["train/group_reward_std"] == pytest.approx(np.std([1.0, 0.5], ddof=1)), "within a role"
    assert {name: rows.tolist() for name, rows in by_source(found).items()} == {
        "first": [True, False, True, False],
        "second": [False, True, False, True],
    }


@pytest.mark.notices(
    "dynamic filtering mixes the roles of a group",
    "rl/filtering.py",
    "for own in scores_by_role(trained))",
    "for own in [scores])",
)
def test_a_group_is_left_out_if_it_teaches_no_role():
    ledgers = [part(role, 2, sample=sample) for sample in range(2) for role in ROLES]
    filters = Filters(AlgoConfig.of("ppo", dynamic_filtering_enable=True, dynamic_filtering_range=[-2.0, 2.0]), [], 0)
    assert filters.objection(scored(ledgers, [1.0, -1.0, 1.0, -1.0])) is not None, "each role has the same each time"
    assert filters.objection(scored(ledgers, [1.0, -1.0, 1.0, 0.0])) is None


def test_the_greedy_baseline_is_that_of_the_role():
    ledgers = [part(role, 2) for role in ROLES] + [replace(part(role, 2), greedy=True) for role in ROLES]
    shaped = Shaper(RewardConfig.of("ppo"), lambda prompt: 10).shape(scored(ledgers, [1.0, -1.0, 0.5, -0.5]))
    assert shaped.greedy.tolist() == [0.5, -0.5]


def test_roles_that_wait_on_disk_are_the_same(tmp_path):
    ledgers, rewards = games(np.random.default_rng(1), groups=1)
    write_samples(tmp_path, join_groups([scored(ledgers, rewards.tolist())]))
    found = read_samples(tmp_path)
    assert [(t.role, t.sample, t.fork) for t in found.trajectories] == [(t.role, t.sample, t.fork) for t in ledgers]


CODE = """
from rlhf_suite.agents.base import Start, Step

class Environment:
    roles = ("first", "second")

    async def reset(self, task):
        self.said = {role: 0 for role in self.roles}
        return {"first": Start(text="first " + task.text), "second": Start(text="second " + task.text)}

    async def step(self, role, turn):
        self.said[role] += len(turn.ids)
        if role == "second":
            return Step(done=True, rewards={"first": self.said["first"] / 8, "second": -self.said["second"] / 8})
        return Step(text=" go ", role="second")

    async def close(self): ...
"""


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """The folder of a run of games."""
    folder = tmp_path_factory.mktemp("roles")
    ranks(1).call(run, folder, settings(folder, CODE, eval__max_calls=None, ckpt__save_steps=1))
    return folder


def rows_of(folder: Path) -> list[list[dict]]:
    return [pq.read_table(file).to_pylist() for file in sorted((folder / "rollouts").glob("*.parquet"))]


def test_a_run_trains_each_role_on_its_own_reward(whole):
    for table in rows_of(whole):
        assert {row["role"] for row in table} == {"first", "second"}
        for row in table:
            written = sum(owner == MODEL for owner in row["owner"])
            assert row["reward"] == pytest.approx((1 if row["role"] == "first" else -1) * written / 8)
            assert row[f"reward/{row['role']}"] == pytest.approx(row["reward"])
            peers = [other for other in table if (other["role"], other["group"]) == (row["role"], row["group"])]
            advantage = row["reward"] - np.mean([other["reward"] for other in peers if other is not row])
            given = {a for a, owner in zip(row["advantages"], row["owner"], strict=True) if owner == MODEL}
            assert [*given] == pytest.approx([advantage], abs=1e-6), "rloo, of two samples"


def test_metrics_of_a_run_have_the_roles(whole):
    row = [row for row in read_rows(whole / "metrics.jsonl") if "train/reward" in row][-1]
    table = rows_of(whole)[-1]
    for role in ROLES:
        mean = np.mean([each["reward"] for each in table if each["role"] == role])
        assert row[f"train/{role}/reward"] == pytest.approx(mean) == row[f"reward/{role}"]
    evaluated = [row for row in read_rows(whole / "metrics.jsonl") if "eval/pass1" in row][-1]
    assert {f"eval/{role}/pass1" for role in ROLES} <= evaluated.keys()


def test_a_replay_of_games_ends_in_the_same_weights(ranks, whole, tmp_path):
    flags = {"rollout__replay": str(whole), "eval__max_calls": None, "eval__dataset": None, "eval__steps": -1}
    ranks(1).call(run, tmp_path, settings(tmp_path, CODE, **flags))
    mine, theirs = ((folder / "model/model.safetensors").read_bytes() for folder in (tmp_path, whole))
    assert mine == theirs
