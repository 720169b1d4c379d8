"""Runs whose episodes are in processes of their own end in the weights of those whose driver runs them, also if such a
process is killed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jobs
import pytest

ENVIRONMENT = """
import os, signal
from pathlib import Path
from rlhf_suite.agents.base import Start, Step

FIRST_DEADLY = {number}  # the episode of a process from which on it dies
EPISODES = 0

def takes_a_death():
    for death in Path(__file__).parent.glob("death-*"):
        try:
            death.unlink()  # of several processes one succeeds
        except FileNotFoundError:
            continue
        return True
    return False

class Environment:
    async def reset(self, task):
        global EPISODES
        EPISODES += 1
        self.label, self.turns, self.number = task.label, 0, EPISODES
        return Start()

    async def step(self, turn):
        self.turns += 1
        if self.turns == 2 and self.number >= FIRST_DEADLY and takes_a_death():
            print("this process ends", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        right = turn.content.strip() == self.label
        if right or self.turns == 3:
            return Step(reward=float(right), done=True)
        return Step(text="\\nno, again: ", reward=-0.1 * len(turn.ids))

    async def close(self): ...
"""
WORDS = [
    *jobs.SMALL,
    "agent.kind=environment",
    "reward.rule=null",
    "rollout.stop=null",
    "rollout.max_new_tokens=64",
    "data.max_len=96",
    "algo.advantage.estimator=dr_grpo",
    "algo.kl.init_coef=0",
    "train.max_steps=2",
    "eval.steps=2",
]
AHEAD = ["correction=tis", "train.async_enable=true"]
STREAM = [*AHEAD, "train.async_queue_size=2", "train.partial_rollout_enable=true"]


@pytest.fixture(scope="module")
def words(runs: Path, warm: Path):
    """Returns the command line of a run in which a process dies after its episode `number`, so many `times` in all."""

    def make(name: str, *more: str, number: int = 0, times: int = 0) -> list[str]:
        folder = runs / "episode_workers" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "environment.py").write_text(ENVIRONMENT.replace("{number}", str(number)))
        for death in range(times):
            (folder / f"death-{death}").touch()
        file = f"train.agent_func_path={folder / 'environment.py'}"
        return [*WORDS, f"actor.model_name_or_path={warm}", file, *more]

    return make


@pytest.fixture(scope="module")
def in_the_driver(runs: Path, words):
    """The folder of a run whose driver runs the episodes, in a schedule, made when it is first asked for."""

    @cache
    def folder(name: str, *more: str) -> Path:
        path = runs / f"episodes_in_the_driver_{name}"
        jobs.run(path, words(path.name, *more))
        return path

    return folder


def assert_same(mine: Path, theirs: Path, steps: int = 2) -> None:
    assert jobs.digest(mine) == jobs.digest(theirs)
    assert jobs.timeless(jobs.train_rows(mine)) == jobs.timeless(jobs.train_rows(theirs))
    assert jobs.timeless(jobs.eval_rows(mine)) == jobs.timeless(jobs.eval_rows(theirs))
    for step in range(1, steps + 1):
        assert jobs.rollout(mine, step) == jobs.rollout(theirs, step)


@pytest.mark.proof
def test_a_run_whose_worker_dies_in_an_episode_ends_in_the_weights_of_one_whose_driver_runs_the_episodes(
    runs, words, in_the_driver
):
    folder = runs / "two_workers"
    named = "agent.sources={words: {kind: environment, datasets: [default]}}"  # the same agent, by the datasource
    ended = jobs.run(folder, words(folder.name, "agent.num_workers=2", named, number=11, times=1))
    assert "episode workers x 2" in ended.out
    assert "It is started again (restart 1 of 3, agent.max_restarts)" in ended.err
    assert "unfinished episodes start again" in ended.out
    assert any("this process ends" in log.read_text() for log in (folder / "logs").glob("episode-worker-*.log"))
    assert_same(folder, in_the_driver("each_step"))
    rows = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    assert {"engines", "environments", "trainer", "driver"} <= {row["who"] for row in rows}


@pytest.mark.proof
@pytest.mark.parametrize("workers", [1, 2])
def test_rollouts_that_are_made_ahead_are_the_same_in_any_number_of_workers(runs, words, in_the_driver, workers):
    folder = runs / f"{workers}_workers_ahead"
    jobs.run(folder, words(folder.name, *AHEAD, f"agent.num_workers={workers}"))
    assert_same(folder, in_the_driver("ahead", *AHEAD))


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["each_step", "ahead", "stream"])
def test_a_worker_that_is_killed_from_outside_costs_no_sample(runs, words, in_the_driver, mode):
    more = ["train.max_steps=8", *{"each_step": [], "ahead": AHEAD, "stream": STREAM}[mode]]
    folder = runs / f"killed_worker_{mode}"
    job = jobs.Job(folder, words(folder.name, *more, "agent.num_workers=2"))
    for step, number in ((2, 0), (4, 1)):
        job.wait_for_step(step)
        job.actor(f"episode-worker-{number}").kill()
    ended = job.ended()
    assert ended.code == 0, ended.err
    assert ended.err.count("(restart 1 of 3, agent.max_restarts)") == 2
    if mode != "stream":
        assert_same(folder, in_the_driver(f"{mode}_longer", *more), steps=8)
        return
    trained = [row["prompt_index"] for step in range(8) for row in jobs.rollout(folder, step + 1) if not row["sample"]]
    assert len(trained) == len({*trained}) == 4 * 8


@pytest.mark.proof
def test_a_worker_that_dies_in_the_same_episode_each_time_ends_the_run(runs, words):
    folder = runs / "worker_dies_each_time"
    more = ("agent.num_workers=1", "agent.max_restarts=1")
    job = jobs.Job(folder, words(folder.name, *more, number=11, times=9))
    job.wait_for((folder / "logs" / "episode-worker-0.log").exists)
    family = job.family()
    ended = job.ended()
    assert ended.code == 1 and "Traceback" not in ended.err
    assert "(restart 1 of 1, agent.max_restarts)" in ended.err
    assert "It had been started again 1 times (agent.max_restarts=1)" in ended.err
    assert "this process ends" in ended.err, "the end of the worker's log"
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"
    assert jobs.survivors(family, 15) == []


@pytest.mark.proof
@pytest.mark.parametrize(
    ("code", "place"),
    [
        (
            "import nowhere_to_be_found\n" + ENVIRONMENT.replace("{number}", "0"),
            "importing it raised ModuleNotFoundError",
        ),
        (ENVIRONMENT.replace("{number}", "0").replace("right =", "right = 1 / 0 ==", 1), "ZeroDivisionError"),
    ],
)
def test_a_mistake_in_the_users_code_is_said_as_the_driver_says_it(runs, words, code, place):
    said = []
    for workers in (0, 2):
        folder = runs / f"mistake_{place[-9:]}_{workers}"
        line = words("mistake", f"agent.num_workers={workers}")
        (runs / "episode_workers" / "mistake" / "environment.py").write_text(code)
        job = jobs.Job(folder, line)
        ended = job.ended()
        message = next(each for each in ended.err.splitlines() if place in each)
        said.append((ended.code, message.replace(str(folder), "")))
        assert "Traceback" not in ended.err
    assert said[0] == said[1] and said[0][0] in (1, 2)


PROGRAM = """
import json, urllib.request

def run_agent(task, base_url, api_key):
    messages = list(task.messages)
    for _ in range(2):
        body = json.dumps({"messages": messages, "max_tokens": 12}).encode()
        headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            choice = json.load(answer)["choices"][0]
        messages += [choice["message"], {"role": "user", "content": "go on"}]
    return {"reward": len(choice["token_ids"]) / 4}
"""
KINDS = {
    "endpoint": ["agent.kind=endpoint", "train.agent_func_path={folder}/program.py", "reward.rule=null"],
    "python": ["agent.kind=python", "agent.python_style=fence"],
}


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_the_other_kinds_of_agents_run_in_workers_and_leave_nothing_behind(runs, warm, kind):
    files = runs / "agents_of_workers"
    files.mkdir(exist_ok=True)
    (files / "program.py").write_text(PROGRAM)
    own = [word.format(folder=files) for word in KINDS[kind]]
    own += [] if kind == "python" else ["data.apply_chat_template=true", "data.input_template=null"]
    own += [f"actor.model_name_or_path={warm}", "data.max_len=800"]
    taken = ("reward.rule", "rollout.stop", *(word.partition("=")[0] for word in own))
    words = [*(word for word in WORDS if word.partition("=")[0] not in taken), *own]
    folders = [runs / f"{kind}_in_{workers}_workers" for workers in (0, 2)]
    jobs.run(folders[0], words)
    job = jobs.Job(folders[1], [*words, "agent.num_workers=2"])
    job.wait_for_step(1)
    family = job.family()
    assert job.ended().code == 0, job.text()
    assert_same(folders[1], folders[0], steps=2)
    assert jobs.survivors(family, 15) == []
