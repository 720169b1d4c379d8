"""Samples that wait in a checkpoint come back as they were, whatever they hold."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from given import prompt
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.images import Image
from rlhf_suite.data.trajectory import CallRecord, Trajectory, TurnRecord
from rlhf_suite.rl.sample_table import FILE, read_samples, write_samples
from rlhf_suite.rl.samples import ScoredTrajectories, join_groups

SEEN = (Image(1, 1, b"\x89PNG\0\xff"),)
ASKED = {
    "plain": prompt(7, [1, 2, 3], "ask", label="4", columns='{"level": 3}', chat='{"messages": []}'),
    "of a source": prompt(2, [5], "höre", "math", source="sums", where="b.jsonl:3"),
    "with an image": prompt(4, [1, 9, 2], "look", images=SEEN),
}


TURNS = [
    TurnRecord(6, 0.1, 1 / 3, [CallRecord("f", '{"x": "ö"}', None, "4"), CallRecord("g", "{}", "is not JSON")]),
    TurnRecord(9, math.pi),
]


def ledger(name: str, group: int, sample: int, fork: int = 0, **values: Any) -> Trajectory:
    made = Trajectory.start(ASKED[name], group, sample)
    made.append_model(np.arange(3 + sample), -np.linspace(0.1, 0.7, 3 + sample).astype(np.float32), 5)
    made.turn_rewards[-1] = math.pi * sample
    made.append_environment([9, 9], (Image(len(made.ids), 2, b"GIF"),) if name == "with an image" else ())
    made.append_model(np.array([8]), np.array([-0.25], np.float32), 6)
    made.fork = fork
    for field, value in values.items():
        setattr(made, field, value)
    return made


def samples(*trajectories: Trajectory, **more: Any) -> ScoredTrajectories:
    count = len(trajectories)
    rewards = np.linspace(-1, math.pi, count).astype(np.float32)
    texts = [f"text {row} \N{SNOWMAN}\n" for row in range(count)]
    extra = [{"agent/turns": 2.0, "steps/mean": math.nan}, {}, {"steps/mean": 0.1, "reward/odd name": -0.0}]
    return ScoredTrajectories([*trajectories], rewards, rewards / 3, texts, texts[::-1], extra[:count], **more)


CASES = {
    "one turn each": samples(ledger("plain", 0, 0), ledger("plain", 0, 1), ledger("plain", 0, 2, greedy=True)),
    "several ledgers": samples(
        ledger("of a source", 3, 0, extra={"agent/turns": 2.0}),
        ledger("of a source", 3, 0, fork=1, ending=Ending.TURNS, reward=0.1, extra={"agent/turns": 2.0, "x": math.nan}),
        ledger("of a source", 3, 1, reward=math.nan, score=0.3, turn_records=TURNS),
        reasons=[{"reason": "no\nVERDICT"}, {}, {"judge/reason": "", "reason": "yes"}],
    ),
    "images": samples(ledger("with an image", 0, 0), ledger("with an image", 0, 1, images=())),
    "routes": samples(
        ledger("plain", 0, 0, routes=np.arange(9 * 6, dtype=np.int8).reshape(9, 3, 2)),
        ledger("plain", 0, 1),
    ),
    "all there is": samples(
        ledger("plain", 0, 0, ending=Ending.FAILED, failure="no luck"),
        greedy=np.array([0.1], np.float32),
        retries=np.array([3], np.int32),
    ),
}


def content(value: Any) -> Any:
    """Return a value so that equal contents, of the same types, are equal."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, dict):
        return {name: content(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [content(each) for each in value]
    if isinstance(value, ScoredTrajectories | Trajectory | TurnRecord | type(ASKED["plain"])):
        return {each.name: content(getattr(value, each.name)) for each in fields(value)}
    return value


@pytest.mark.parametrize("case", CASES)
def test_samples_are_read_as_they_were_written(tmp_path, case):
    write_samples(tmp_path, CASES[case])
    read = read_samples(tmp_path)
    assert content(read) == content(CASES[case])
    assert all(t.ids.flags.writeable and t.turn_rewards.flags.writeable for t in read.trajectories)


def test_groups_of_several_prompts_share_a_file(tmp_path):
    whole = join_groups([CASES["one turn each"], CASES["several ledgers"]])
    write_samples(tmp_path, whole)
    read = read_samples(tmp_path)
    assert content(read) == content(whole)
    first, *_, last = read.trajectories
    assert first.prompt is read.trajectories[2].prompt and first.prompt is not last.prompt


def test_groups_with_and_without_reasons_share_a_step():
    whole = join_groups([CASES["one turn each"], CASES["several ledgers"]])
    assert whole.reasons == [{}] * 3 + CASES["several ledgers"].reasons
    assert join_groups([CASES["one turn each"]] * 2).reasons is None


def test_numbers_of_rewards_and_agents_are_columns_and_missing_ones_are_empty(tmp_path):
    write_samples(tmp_path, CASES["several ledgers"])
    table = pq.read_table(tmp_path / FILE)
    assert table["agent/turns"].to_pylist() == [2.0, None, None]
    assert table["reward/steps/mean"].null_count == 1 and math.isnan(table["reward/steps/mean"][0].as_py())
    assert table["reward/reward/odd name"].to_pylist()[2] == 0.0
