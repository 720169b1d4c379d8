"""Runs whose rollouts are a stream of groups: the bound on staleness, each group once, and how a run continues."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading

import plain_run
import pyarrow.parquet as pq
import pytest
from plain_run import run, small

from rlhf_suite.errors import RunError
from rlhf_suite.rl import build
from rlhf_suite.rl.schedules import Stream
from rlhf_suite.tracking.metrics import read_rows

STEPS = 6
FLAGS = {
    "train__num_episodes": 3,
    "train__async_enable": True,
    "train__async_queue_size": 2,
    "train__partial_rollout_enable": True,
    "ckpt__save_steps": 2,
    "ckpt__load_enable": True,
    "algo__advantage__is_correction_level": "token",
}
SHARED = FLAGS | {"train__async_enable": False, "train__colocate_all": True}
FILTERED = {
    "algo__dynamic_filtering_enable": True,
    "algo__dynamic_filtering_range": [0.0, 1.0],
    "rollout__temperature": 1.5,
}


def rollout(folder, step):
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def prompts(folder) -> list[int]:
    return sorted(s["prompt_index"] for step in range(1, STEPS + 1) for s in rollout(folder, step) if s["sample"] == 0)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    ranks(1).call(run, folder, small(**FLAGS))
    return folder


def streamed_run(world, folder, config) -> None:
    """Run as a stream whose groups are trained by the step in which they begin; a run would be synchronous then."""

    def make(config, plan, scorer) -> Stream:
        return Stream(0, 0, config.algo.dynamic_filtering_max_rounds * config.rollout.batch_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_schedule", make)
        run(world, folder, config)


# One group a step: a synchronous round of several groups may accept too many, which then wait and grow old.
ONE_GROUP = FILTERED | {
    "algo__dynamic_filtering_range": [0.0, 0.7],
    "rollout__batch_size": 1,
    "train__batch_size": 2,
    "train__num_episodes": 2,
}


@pytest.mark.parametrize(("steps", "more"), [(STEPS, {}), (8, ONE_GROUP)], ids=["all groups", "filtered"])
def test_a_stream_without_staleness_is_a_synchronous_run(ranks, tmp_path, steps, more):
    plain = {"train__async_enable": False, "train__partial_rollout_enable": False, "ckpt__load_enable": False}
    for name, make in (("stream", streamed_run), ("plain", run)):
        ranks(1).call(make, tmp_path / name, small(**FLAGS | plain | more))
    for step in range(1, steps + 1):
        assert rollout(tmp_path / "stream", step) == rollout(tmp_path / "plain", step)
    assert not (tmp_path / f"stream/rollouts/step_{steps + 1:06d}.parquet").exists()
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("stream", "plain")]
    assert weights[0] == weights[1]
    rows = [row for row in read_rows(tmp_path / "stream/metrics.jsonl") if "async/outstanding" in row]
    assert len(rows) == steps and (sum(row["async/rejected"] for row in rows) > 0) == bool(more)


def assert_sound(folder, bound=2) -> None:
    """Every prompt once an epoch, no token of weights that are too old, and what the metrics say of it."""
    assert prompts(folder) == sorted([*range(4)] * 3)
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "train/reward" in row]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    for step, row in enumerate(rows):
        versions = [v for s in rollout(folder, step + 1) for v in s["weight_version"] if v >= 0]
        assert step - bound <= min(versions) <= max(versions) <= step
        assert row["async/staleness_max"] == step - min(versions) and row["async/rejected"] == 0


def test_a_run_trains_on_every_prompt_once_an_epoch_within_the_bound(whole):
    assert_sound(whole)


@pytest.fixture(scope="module")
def shared(ranks, tmp_path_factory):
    """A run whose engines pause while the models train."""
    folder = tmp_path_factory.mktemp("shared")
    ranks(1).call(run, folder, small(**SHARED))
    return folder


def test_engines_that_share_their_devices_write_nothing_while_the_models_train(shared):
    assert_sound(shared)
    lines = [json.loads(line) for line in (shared / "timeline.jsonl").read_text().splitlines()]
    training = [each for each in lines if each["who"] == "trainer"]
    generating = [each for each in lines if each["who"] == "engines"]
    assert generating and training
    assert not any(a["begin"] < b["end"] and b["begin"] < a["end"] for a in training for b in generating)


def test_a_run_on_shared_devices_that_was_stopped_trains_on_every_prompt_once_an_epoch(ranks, shared, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(shared, again)
    for later in (*(again / "checkpoints").glob("step_*"), again / "model"):
        if later.name > "step_000002" or later.name == "model":
            shutil.rmtree(later)
    ranks(1).call(run, again, small(**SHARED))
    assert_sound(again)


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_that_was_stopped_makes_the_groups_that_were_running_again(ranks, whole, tmp_path, step):
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    for later in (*(again / "checkpoints").glob("step_*"), again / "model"):
        if later.name > f"step_{step:06d}" or later.name == "model":
            shutil.rmtree(later)
    state = json.loads((again / f"checkpoints/step_{step:06d}/samples/slots.json").read_text())
    ranks(1).call(run, again, small(**FLAGS))
    assert_sound(again)
    first = {(s["prompt_index"], s["sample"]): s["ids"] for k in range(step) for s in rollout(whole, k + 1)}
    assert first and state["next"] > 2 * step


def test_rejected_groups_are_on_record_and_others_take_their_place(ranks, tmp_path):
    ranks(1).call(run, tmp_path, small(**FLAGS | FILTERED | {"ckpt__load_enable": False}))
    rejected = rejections(tmp_path)
    assert rejected and all(row["reason"].startswith("scores [") for row in rejected)
    for step in range(1, STEPS + 1):
        samples = rollout(tmp_path, step)
        assert len(samples) == 4
        for group in (0, 1):
            assert len({s["score"] for s in samples if s["group"] == group}) == 2


@pytest.mark.notices(
    "a continued stream keeps the record of groups that it makes again",
    "rl/rollout_tasks.py",
    "lines[: self.table.num_rejected]",
    "lines",
)
def test_a_continued_run_lists_each_rejected_group_once(ranks, tmp_path):
    again, words = tmp_path / "run", small(**FLAGS | FILTERED)
    ranks(1).call(run, again, words)
    for later in (*(again / "checkpoints").glob("step_*"), again / "model"):
        if later.name > "step_000002" or later.name == "model":
            shutil.rmtree(later)
    state = json.loads((again / "checkpoints/step_000002/samples/slots.json").read_text())
    assert len(rejections(again)) > state["num_rejected"]
    ranks(1).call(run, again, words)
    groups = [row["group"] for row in rejections(again)]
    assert len(groups) == len({*groups}) > state["num_rejected"]


def test_no_thread_of_a_run_that_ended_early_is_left(ranks, tmp_path):
    nothing = {"algo__dynamic_filtering_enable": True, "algo__dynamic_filtering_range": [0.99, 1.0]}
    ranks(1).call(failing_run, tmp_path, small(**FLAGS | nothing))
    assert not {"rewards", "rollouts"} & {*ranks(1).call(names_of_threads)[0]}


def names_of_threads(world) -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def rejections(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "rollouts/rejected.jsonl").read_text().splitlines()]


def test_rejecting_group_after_group_ends_the_run(ranks, tmp_path):
    nothing = {"algo__dynamic_filtering_enable": True, "algo__dynamic_filtering_range": [0.99, 1.0]}
    (said,) = ranks(1).call(failing_run, tmp_path, small(**FLAGS | nothing))
    assert "groups were rejected since the last step" in said


def test_an_error_between_scoring_and_training_ends_the_run(ranks, tmp_path):
    (tmp_path / "rollouts/rejected.jsonl").mkdir(parents=True)
    nothing = {"algo__dynamic_filtering_enable": True, "algo__dynamic_filtering_range": [0.99, 1.0]}
    (said,) = ranks(1).call(failing_run, tmp_path, small(**FLAGS | nothing))
    assert "Is a directory" in said


def failing_run(world, folder, config) -> str:
    try:
        run(world, folder, config)
    except (RuntimeError, OSError) as error:
        return str(error)
    return "it did not end"


# One episode waits until four steps are trained and all other groups, of two episodes each, have ended.
STRAGGLER = """
import asyncio
import threading
from pathlib import Path

from rlhf_suite.agents.base import Start, Step

METRICS, OTHERS = Path("METRICS_FILE"), 22
lock, begun, ended = threading.Lock(), [], []

class Environment:
    async def reset(self, task):
        with lock:
            self.is_late = not begun
            begun.append(task.label)
        return Start()

    async def step(self, turn):
        while self.is_late and (steps() < 4 or len(ended) < OTHERS):
            await asyncio.sleep(0.01)
        if self.is_late:
            await asyncio.sleep(2)  # longer than it takes to score the others
        ended.append(turn)
        return Step(reward=len(turn.ids) / 6, done=True, extra={"late": float(self.is_late)})

    async def close(self): ...

def steps():
    return METRICS.read_text().count('"train/reward"') if METRICS.exists() else 0
"""


@pytest.mark.notices(
    "a wait for a late group is one for a batch",
    "rl/schedules.py",
    "has_enough = len(table.ready) >= table.order.size(table.taken)",
    "has_enough = False",
)
def test_a_step_waits_for_a_late_group_at_its_deadline_and_says_so(ranks, tmp_path, record_property):
    file = tmp_path / "late.py"
    file.write_text(STRAGGLER.replace("METRICS_FILE", str(tmp_path / "run/metrics.jsonl")))
    agent = {"agent__kind": "environment", "train__agent_func_path": str(file), "reward__rule": None}
    more = {"reward__stop_properly_penalty_coef": None, "train__async_queue_size": 4}
    ranks(1).call(run, tmp_path / "run", small(**FLAGS | agent | more))
    assert_sound(tmp_path / "run", bound=4)
    late = [step for step in range(STEPS) for s in rollout(tmp_path / "run", step + 1) if s["reward/late"]]
    waits = [
        row.get("timing/waiting_for_deadline", 0.0)
        for row in read_rows(tmp_path / "run/metrics.jsonl")
        if "train/reward" in row
    ]
    record_property("age of the late group, of at most 4", int(late[0]))
    record_property("seconds of its step that it is named for", float(waits[4]))
    assert late == [4] and waits[4] > 0, "begun at version 0, with S = 4"


# The environment of one of the prompts never answers.
STUCK = """
import asyncio, time

from rlhf_suite.agents.base import Start, Step

AHEAD = [0.0]
asyncio.BaseEventLoop.time = lambda loop: time.monotonic() + AHEAD[0]

class Environment:
    async def reset(self, task):
        self.label = task.label
        return Start()

    async def step(self, turn):
        if self.label == "STUCK_LABEL":
            AHEAD[0] += 601.0  # the limit is over at once
            await asyncio.Event().wait()
        return Step(reward=len(turn.ids) / 6, done=True)

    async def close(self): ...
"""


def test_an_environment_that_never_answers_costs_its_group_and_is_named(ranks, whole, tmp_path):
    label = rollout(whole, 1)[0]["label"]
    file = tmp_path / "stuck.py"
    file.write_text(STUCK.replace("STUCK_LABEL", label))
    agent = {"agent__kind": "environment", "train__agent_func_path": str(file), "reward__rule": None}
    agent |= {
        "agent__tool_timeout_s": 600.0,
        "agent__timeout_s": 1e9,
        "agent__on_error": "drop",
        "reward__max_error_rate": 1.0,
    }
    agent |= {"reward__stop_properly_penalty_coef": None, "ckpt__load_enable": False}
    ranks(1).call(run, tmp_path / "run", small(**FLAGS | agent))
    trained = {s["label"] for step in range(1, STEPS + 1) for s in rollout(tmp_path / "run", step)}
    assert len(trained) == 3 and label not in trained
    assert {row["reason"] for row in rejections(tmp_path / "run")} == {"the reward failed"}
    failures = [json.loads(line) for line in (tmp_path / "run/logs/reward_failures.jsonl").read_text().splitlines()]
    assert {row["label"] for row in failures} == {label}
    for row in failures:
        assert row["reason"] == "turn 1: step of the environment took longer than agent.tool_timeout_s=600"


def said_by_a_run_whose_engine_hangs(world, folder, config) -> str:
    """Run with an engine that answers nothing but the first batch, and that does not get the weights of version 1."""
    generate, sync = plain_run.PlainEngines.generate, plain_run.PlainEngines.sync
    asked = []

    async def hang(engines, request):
        asked.append(request)
        if len(asked) > 4:
            await asyncio.Event().wait()
        return await generate(engines, request)

    def fail(engines, backend, version, publish, members):
        if version == 1:
            publish()
            raise RunError("engine-0 hangs")
        return sync(engines, backend, version, publish, members)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_run.PlainEngines, "generate", hang)
        patch.setattr(plain_run.PlainEngines, "sync", fail)
        try:
            run(world, folder, config)
        except RunError as error:
            return str(error)
    return "it did not end"


@pytest.mark.notices(
    "a step waits for ever for groups of weights that do not arrive",
    "rl/engine_update.py",
    "self.beside.task(",
    "self.beside.start(",
    limit_s=120,
)
def test_a_step_that_waits_for_groups_ends_when_the_weights_do_not_arrive(ranks, tmp_path):
    (said,) = ranks(1).call(said_by_a_run_whose_engine_hangs, tmp_path, small(**FLAGS))
    assert said == "engine-0 hangs"
