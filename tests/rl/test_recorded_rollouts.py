"""What a file of rollouts gives back is what was trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from given import prompt
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import Trajectory, to_batch
from rlhf_suite.rl.replay import Replay
from rlhf_suite.rl.rollout_file import write_rollouts
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.sample_table import read_table
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.run_folders.run_folder import samples_file


def ledger(group: int, sample: int, fork: int = 0, turn_reward: float = 0.0) -> Trajectory:
    """Two turns with an answer of an environment between them, all of other lengths in each group."""
    made = Trajectory.start(prompt(7 + group, [1, 2, 3], datasource="ab"[group]), group, sample)
    made.append_model(np.arange(4 + group), -np.linspace(0.1, 0.7, 4 + group).astype(np.float32), 5)
    made.turn_rewards[-1] = turn_reward
    made.append_environment([9, 9])
    made.append_model(np.array([8]), np.array([-0.25], np.float32), 6)
    made.ending, made.fork = Ending.CUT if sample else Ending.TURNS, fork
    return made


def scored(made: list[Trajectory], greedy: bool) -> ScoredTrajectories:
    rewards = np.linspace(-1, 1, len(made)).astype(np.float32)
    texts = [f"text {row}" for row in range(len(made))]
    extra = [{"length": 0.5, "agent/turns": 2.0} if row % 2 else {"length": 0.25} for row in range(len(made))]
    baseline = rewards / 3 if greedy else None
    return ScoredTrajectories(made, rewards, rewards + 1, texts, texts, extra, baseline)


CASES = {
    "plain": [ledger(0, 0), ledger(0, 1), ledger(1, 0), ledger(1, 1)],
    "turn rewards": [ledger(0, 0, turn_reward=0.5), ledger(0, 1), ledger(1, 0), ledger(1, 1)],
    "forks": [ledger(0, 0), ledger(0, 0, fork=1), ledger(1, 0), ledger(1, 1)],
}


@pytest.mark.notices(
    "a replay trains on scores in place of shaped rewards",
    "rl/sample_table.py",
    'rewards=self.array("reward",',
    'rewards=self.array("score",',
)
@pytest.mark.notices(
    "a replay forgets the rewards of turns",
    "rl/sample_table.py",
    "self.tokens(TURNS, np.float32) if TURNS in self.names else none",
    "none",
)
@pytest.mark.notices(
    "a replay takes the trainer's log-probs for the engine's",
    "rl/sample_table.py",
    '            "engine_log_probs": np.float32,',
    '            "old_log_probs": np.float32,',
)
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_samples_come_back_as_they_were_trained_on(tmp_path, case, greedy):
    samples = scored(CASES[case], greedy)
    given = None if samples.greedy is None else torch.from_numpy(samples.greedy)
    batch = replace(to_batch(samples.trajectories), reward=torch.from_numpy(samples.rewards), greedy=given)
    write_rollouts(tmp_path, 1, samples, batch)
    found = read_table(samples_file(tmp_path, 1))
    again = to_batch(found.trajectories)
    for unit in ("token", "row"):
        columns = to_batch(samples.trajectories).columns(unit)
        assert again.columns(unit).keys() == columns.keys()
        assert all(torch.equal(values, again.columns(unit)[name]) for name, values in columns.items())
    assert torch.equal(again.ids, batch.ids) and torch.equal(again.lengths, batch.lengths)
    for ours, theirs in zip(found.trajectories, samples.trajectories, strict=True):
        assert (ours.prompt.index, ours.group, ours.sample, ours.fork) == (
            theirs.prompt.index,
            theirs.group,
            theirs.sample,
            theirs.fork,
        )
        assert ours.ending == theirs.ending
        assert np.array_equal(ours.version, theirs.version) and np.array_equal(ours.owner, theirs.owner)
    assert np.array_equal(found.rewards, samples.rewards) and found.rewards.dtype == np.float32
    assert np.array_equal(found.scores, samples.scores)
    assert (found.greedy is None) == (not greedy)
    assert not greedy or np.array_equal(found.greedy, samples.greedy)
    assert (found.extra, found.datasources, found.queries) == (samples.extra, samples.datasources, samples.queries)
    assert sample_metrics(found) == sample_metrics(samples)


def test_steps_are_counted_up_to_the_first_that_is_missing(tmp_path):
    samples = scored(CASES["plain"], greedy=False)
    for step in (1, 2, 4):
        batch = to_batch(samples.trajectories)
        write_rollouts(tmp_path, step, samples, replace(batch, reward=torch.from_numpy(samples.rewards)))
    assert Replay(tmp_path).steps == 2
    assert pq.read_metadata(samples_file(tmp_path, 1)).num_rows == 4


def test_the_log_probs_of_the_engine_come_back_and_not_the_trainers(tmp_path):
    samples = scored(CASES["plain"], greedy=False)
    batch = replace(to_batch(samples.trajectories), reward=torch.from_numpy(samples.rewards))
    write_rollouts(tmp_path, 1, samples, replace(batch, old_log_probs=batch.engine_log_probs - 0.5))
    again = to_batch(read_table(samples_file(tmp_path, 1)).trajectories)
    assert torch.equal(again.engine_log_probs, batch.engine_log_probs)
