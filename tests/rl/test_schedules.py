"""Rollouts that are made ahead of training: which weights write them, and that a run is the same each time."""

from __future__ import annotations

import io
import json
import shutil
import threading
from contextlib import redirect_stderr

import plain_run
import pytest
from plain_run import run, small
from schedule_runs import FLAGS, STEPS, ahead, assert_same_run, rollout, steps

from rlhf_suite.errors import RunError
from rlhf_suite.polling import poll_until
from rlhf_suite.rl.rollout import RolloutBuilder
from rlhf_suite.rl.update import Updater
from rlhf_suite.tracking.metrics import read_rows

pytestmark = pytest.mark.stack
FILTERED = {
    "algo__dynamic_filtering_enable": True,
    "algo__dynamic_filtering_range": [0.0, 1.0],
    "rollout__vllm_generate_batch_size": 3,
    "rollout__temperature": 1.5,
}


@pytest.fixture(scope="module")
def folders(ranks, tmp_path_factory):
    """The folder of a run of each kind, made when it is first asked for."""
    made = {}

    def folder(depth, filtered=False):
        if (depth, filtered) not in made:
            path = made[depth, filtered] = tmp_path_factory.mktemp(f"ahead_{depth}")
            more = FILTERED if filtered else {}
            ranks(1).call(run, path, small(**FLAGS, **more) if depth is None else ahead(depth, **more))
        return made[depth, filtered]

    return folder


@pytest.mark.parametrize("filtered", [False, True])
def test_rollouts_made_0_steps_ahead_are_those_of_a_synchronous_run(folders, filtered):
    assert_same_run(folders(0, filtered), folders(None, filtered))


@pytest.mark.notices(
    "a rollout that is made ahead begins one weight sync too early",
    "rl/schedules.py",
    "return last - self.depth",
    "return last - self.depth - 1",
)
@pytest.mark.parametrize("depth", [1, 2])
def test_rollout_k_is_written_by_version_k_less_the_depth_whole(folders, depth):
    assert len(steps(folders(depth))) == STEPS
    for step, row in enumerate(steps(folders(depth))):
        age = min(step, depth)
        assert row["async/staleness_mean"] == row["async/staleness_max"] == age
        assert row["async/versions_per_ledger"] == 1
        for sample in rollout(folders(depth), step + 1):
            pairs = zip(sample["weight_version"], sample["owner"], strict=True)
            assert {version for version, owner in pairs if owner} == {step - age}


def test_older_weights_write_other_rollouts(folders):
    assert rollout(folders(1), 1) == rollout(folders(None), 1)
    assert rollout(folders(1), STEPS) != rollout(folders(None), STEPS)


@pytest.mark.parametrize(("depth", "filtered"), [(1, False), (2, True)])
def test_a_run_that_was_stopped_continues_with_the_rollouts_that_were_made(ranks, folders, tmp_path, depth, filtered):
    again = tmp_path / "again"
    shutil.copytree(folders(depth, filtered), again)
    for later in (*(again / "checkpoints").glob("step_00000[46]"), again / "model"):
        shutil.rmtree(later)
    ranks(1).call(run, again, ahead(depth, **(FILTERED if filtered else {})))
    assert_same_run(again, folders(depth, filtered))


def errors_of_a_run(world, folder, config) -> str:
    """Run, and return what was written to the error stream. (That of a process of ranks is none of a test's own.)"""
    with redirect_stderr(io.StringIO()) as said:
        run(world, folder, config)
    return said.getvalue()


def test_a_run_that_continues_with_another_batch_size_says_that_it_begins_with_new_groups(ranks, folders, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(folders(1), again)
    for later in (*(again / "checkpoints").glob("step_00000[46]"), again / "model"):
        shutil.rmtree(later)
    before = steps(again)[0]["rollout/num_samples"]
    (said,) = ranks(1).call(errors_of_a_run, again, ahead(1, rollout__batch_size=1))
    sizes = [row["rollout/num_samples"] for row in steps(again)]
    assert sizes == [before] * 2 + [before / 2] * 10
    assert "Step 3 begins with new ones" in said


def probed_while_rollouts_are_made(world, folder, config) -> list[bool]:
    """Run with a probe that waits until the engine has been asked for the next rollout."""
    probe, found = plain_run.PlainEngines.score, []

    def score(engines, sequences):
        made = 4 * (engines.version + 1)  # samples of the rollouts that ended before this sync
        if 1 <= engines.version < STEPS - 1:
            found.append(poll_until(lambda: len(engines.asked) > made, 300))
        return probe(engines, sequences)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_run.PlainEngines, "score", score)
        run(world, folder, config)
    return found


def test_the_next_rollout_begins_before_the_probe_of_its_weights_is_over(ranks, tmp_path):
    (found,) = ranks(1).call(probed_while_rollouts_are_made, tmp_path, ahead(1))
    assert found == [True] * (STEPS - 2)


def trained_while_probed(world, folder, config) -> list[bool]:
    """Run with a probe that waits until the policy is asked to train the next step. A checkpoint, here after each
    second step, waits for the probe. The next step does not train before the weights are read, however late that is."""
    plain, update, begun, found = plain_run.PlainEngines, Updater.update, [], []
    probe, sync = plain.score, plain.sync

    def late(engines, backend, version, publish, members):
        if version == 1:
            found.append(not poll_until(lambda: len(begun) > 1, 1))
        return sync(engines, backend, version, publish, members)

    def score(engines, sequences):
        if engines.version in {1, 3, 5}:
            found.append(poll_until(lambda: len(begun) > engines.version, 300))
        return probe(engines, sequences)

    def counted(*arguments):
        begun.append(arguments)
        return update(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "score", score)
        patch.setattr(plain, "sync", late)
        patch.setattr(Updater, "update", counted)
        run(world, folder, config)
    return found


@pytest.mark.notices(
    "the policy waits for the sync of its weights",
    "config/plan/run_plan.py",
    "overlaps_sync=overlaps",
    "overlaps_sync=False",
)
@pytest.mark.notices(
    "a step trains before the policy is asked for its part of the probe",
    "rl/engine_update.py",
    '        result(queued, f"the policy to be asked for the weights {version}", THREAD)\n',
    "",
)
def test_the_policy_trains_while_its_last_weights_are_probed(ranks, folders, tmp_path):
    (found,) = ranks(1).call(trained_while_probed, tmp_path, ahead(1))
    assert found == [True] * 4
    assert_same_run(tmp_path, folders(1))


@pytest.mark.notices(
    "a checkpoint does not wait for the proof of the weights", "train/saving.py", "row = metrics()", "row = dict()"
)
def test_every_sync_beside_a_step_is_probed_and_logged_with_its_own_step(folders):
    found = [(row["step"], row["sync/probe"]) for row in read_rows(folders(1) / "metrics.jsonl") if "sync/probe" in row]
    assert [step for step, _ in found] == [*range(1, STEPS + 1)]
    assert all(0 < gap < 1e-5 for _, gap in found)
    saved = [json.loads(path.read_text()) for path in folders(1).glob("checkpoints/step_*/metric.json")]
    assert saved and all(each["metrics"]["sync/probe"] == dict(found)[each["step"]] for each in saved)


def deaf_run(world, folder, config) -> str:
    try:
        run(world, folder, config, is_deaf=True)
    except RunError as error:
        return str(error)
    return "it did not end"


def run_with_a_wrong_last_probe(world, folder, config) -> str:
    probe = plain_run.PlainEngines.score

    def score(engines, sequences):
        return [[each + (engines.version == STEPS) for each in found] for found in probe(engines, sequences)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_run.PlainEngines, "score", score)
        try:
            run(world, folder, config)
        except RunError as error:
            return str(error)
    return "it did not end"


@pytest.mark.notices(
    "the end of a run does not wait for the proof of its last weights",
    "train/loop.py",
    "            self.finish_step()\n            for model in self.exported:",
    "            for model in self.exported:",
)
def test_a_run_does_not_end_before_its_last_weights_are_proven(ranks, tmp_path):
    flags = FLAGS | {"ckpt__save_steps": 4, "train__async_enable": True}
    (said,) = ranks(1).call(run_with_a_wrong_last_probe, tmp_path, small(**flags))
    assert said.startswith(f"sync of version {STEPS}: all tensors arrived, but an engine's log-probs differ")
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_waits_for_the_probe_of_the_weights_that_write_its_rollouts(ranks, tmp_path):
    flags = FLAGS | {"ckpt__save_steps": 1, "train__async_enable": True}
    (said,) = ranks(1).call(deaf_run, tmp_path, small(**flags, actor__adam__lr=0.05))
    assert said.startswith("sync of version 1: all tensors arrived, but an engine's log-probs differ")
    assert not [*tmp_path.glob("checkpoints/*/*")]


def scored_when_a_run_fails(world, folder, config) -> list[str]:
    """Run with an engine that keeps its old weights, so that the probe ends the run while the next rollout is scored,
    and return what has happened when the run is over."""
    probe, score, begun = plain_run.PlainEngines.score, RolloutBuilder.score, threading.Event()
    loops, happened = [], []

    def late(builder, groups):
        if not loops:
            return score(builder, groups)
        begun.set()
        assert poll_until(lambda: loops[0].error is not None, 300)
        threading.Event().wait(0.5)
        happened.append("the scores are there")
        return score(builder, groups)

    def failing(engines, sequences):
        if engines.version == 1:
            loops.append(engines.loop)
            assert begun.wait(300)
            happened.append("the probe fails")
        return probe(engines, sequences)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutBuilder, "score", late)
        patch.setattr(plain_run.PlainEngines, "score", failing)
        with pytest.raises(RunError, match="log-probs differ"):
            run(world, folder, config, is_deaf=True)
        return [*happened]


@pytest.mark.notices(
    "a run that ends does not wait for the threads of its loop",
    "rl/pipeline.py",
    "self.loop.join_threads(CLOSING_S)",
    "pass",
)
def test_a_run_that_ends_early_waits_for_the_threads_of_its_loop(ranks, tmp_path):
    (happened,) = ranks(1).call(scored_when_a_run_fails, tmp_path, ahead(1, actor__adam__lr=0.05))
    assert happened == ["the probe fails", "the scores are there"]


@pytest.mark.notices(
    "what follows the last step is not in the timeline",
    "rl/pipeline.py",
    "self.journal.timeline.close(self.journal.folder.timeline)",
    "pass",
)
def test_the_timeline_has_the_rollouts_beside_the_training(folders):
    rows = [json.loads(line) for line in (folders(1) / "timeline.jsonl").read_text().splitlines()]
    assert {"engines", "rewards", "trainer"} <= {row["who"] for row in rows}
    assert all(row["begin"] <= row["end"] for row in rows)
    assert [row["what"] for row in rows].count("save") == STEPS, "also what followed the last step"
    assert all(0 <= row["perf/trainer_idle"] <= 1 and 0 <= row.get("perf/overlap", 0) <= 1 for row in steps(folders(1)))
