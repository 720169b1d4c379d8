"""Whatever fails, in whatever schedule and phase, ends the run with that very error, and nothing is left behind.

A third of the matrix is of the tier `stack`, the rest are proofs: each run takes a second or two.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from failing_runs import SCHEDULES, TIMES, Fault, Trip, cases, cells, expected, failing_run
from plain_run import run, small

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def recorded(ranks, tmp_path_factory):
    """A whole run, whose rollouts others train on."""
    folder = tmp_path_factory.mktemp("recorded")
    ranks(1).call(run, folder, small(train__num_episodes=2))
    return folder


@pytest.mark.notices(
    "a rollout that fails out of turn is never reported to the driver",
    "launch/loop_thread.py",
    "(error := done.exception()) is not None:\n                self.fail(error)",
    "(error := done.exception()) is not None:\n                pass",
    cases="2 and ahead and generation",
)
@pytest.mark.notices(
    "a failed group of a stream is forgotten",
    "rl/rollout_tasks.py",
    "self.loop.task(self.write(table.begin()))",
    "self.loop.start(self.write(table.begin()))",
    cases="stream and generation",
)
@pytest.mark.notices(
    "an evaluation beside a step takes the error of the engines for a score",
    "rl/pipeline.py",
    "            return self.measure(step)\n",
    "            return {}\n",
    cases="ahead and evaluation",
)
@pytest.mark.notices(
    "a damaged rollout that is replayed is taken for the end of the run",
    "rl/replay.py",
    "        while samples_file(self.folder, count + 1).exists():",
    "        while samples_file(self.folder, count + 1).exists() and count < 2:",
    cases="replay and rollout and 3",
)
@pytest.mark.notices(
    "an error of a user's filter leaves all groups in",
    "rl/filtering.py",
    '        raise UserError(f"{flag} raised {type(error).__name__}: {error}") from error',
    "        return None",
    cases="1 and ahead and group",
)
@pytest.mark.parametrize(
    ("schedule", "phase", "number"),
    [
        pytest.param(schedule, phase, number, marks=() if in_ci else pytest.mark.proof)
        for schedule, phase, number, in_ci in cells()
    ],
)
def test_a_failure_ends_the_run_with_that_error_and_leaves_nothing(ranks, request, tmp_path, schedule, phase, number):
    if schedule == "replay":
        (tmp_path / "recorded").symlink_to(request.getfixturevalue("recorded"))
    (outcome,) = ranks(1).call(failing_run, tmp_path, schedule, phase, number)
    assert expected(phase, number) in outcome.said
    assert outcome.is_the_fault or phase not in ("generation", "experience", "update", "sync", "probe", "evaluation")
    assert outcome.left == []


def test_the_matrix_has_every_schedule_of_a_run():
    assert len(SCHEDULES) == 7 and len(cases()) == 6 * 12 + 5
    in_ci = {cell[:3] for cell in cells() if cell[3]}
    assert len(in_ci) == len(cases())
    assert {(schedule, number) for schedule, _, number in in_ci} == set(product(SCHEDULES, TIMES))


def asked_before_the_first_probe(world, folder: Path) -> dict[str, int]:
    """Run until the first probe, which fails, and return how often everything was asked for before."""
    trip = Trip("probe", 0, Fault("the first weights are wrong"))
    with pytest.raises(Fault, match="the first weights are wrong"):
        run(world, folder, small(train__num_episodes=2), trip=trip)
    return dict(trip.counts)


@pytest.mark.notices(
    "the first weights are not probed",
    "rl/engine_update.py",
    "            self.weights.sync(version)\n            self.weights.check()\n",
    "            self.weights.sync(version)\n",
)
def test_the_first_weights_are_proven_before_anything_is_written_with_them(ranks, tmp_path):
    (asked,) = ranks(1).call(asked_before_the_first_probe, tmp_path)
    assert asked["sync"] == asked["probe"] == 1 and "generation" not in asked
