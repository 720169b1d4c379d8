"""Episodes in real processes of their own: what they are given, what they give back, and what becomes of them when one
dies."""

from __future__ import annotations

import json
import os
import time

import episode_jobs
import psutil
import pytest
import ray
from episode_jobs import CODE, Job, content, ledgers

from actor_processes import kill_actor
from local_ray import local_ray
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.engines.start import start
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.placement import Slot
from rlhf_suite.launch.wait import ActorDied
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.polling import poll_until
from rlhf_suite.tracking.timeline import Timeline

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def cluster():
    ray.cloudpickle.register_pickle_by_value(episode_jobs)
    with local_ray(num_cpus=1):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    create_tiny(folder)
    return str(folder)


def processes(found) -> set[int]:
    return {int(each.extra["process"]) for each in found}


@pytest.mark.notices(
    "ledgers of episode workers cannot be changed", "rl/episode_workers.py", "name: value.copy()", "name: value"
)
@pytest.mark.notices(
    "allowed calls do not hold in episode workers",
    "rl/episode_worker.py",
    "if order.max_turns is not None:",
    "if False:",
)
@pytest.mark.notices(
    "the first episode worker runs all episodes",
    "rl/episode_workers.py",
    "link = min(self.links, key=lambda link: len(link.pending))",
    "link = self.links[0]",
)
def test_episodes_of_two_workers_are_those_of_the_driver(cluster, model, tmp_path):
    job = Job(tmp_path, model, agent__num_workers=2)
    workers = job.workers()
    theirs, ours = ledgers(job.start(workers, 12)), ledgers(job.start(job.here(), 12))
    assert content(theirs) == content(ours)
    assert len({len(each.ids) for each in theirs}) > 3 and all(each.turn_rewards.any() for each in theirs)
    assert processes(ours) == {os.getpid()} and len(processes(theirs) - {os.getpid()}) == 2
    assert all(each.ids.flags.writeable and each.turn_rewards.flags.writeable for each in theirs)
    assert len({asked.id for asked in job.policy.asked}) < len(job.policy.asked), "both workers count from 0"
    printed = [(job.logs / f"episode-worker-{number}.log").read_text() for number in range(2)]
    assert [text.count(" begins") for text in printed] == [6, 6]
    short = ledgers(job.start(workers.limit_turns(2), 4))
    assert content(short) == content(ledgers(job.start(job.here().limit_turns(2), 4)))
    assert {each.extra["agent/turns"] for each in short} == {2.0}
    workers.close()


@pytest.mark.notices(
    "episode workers run more than agent.max_concurrent episodes",
    "rl/episode_workers.py",
    "async with self.slots:",
    "if True:",
)
def test_agent_max_concurrent_is_the_limit_of_all_workers(cluster, model, tmp_path):
    job = Job(tmp_path, model, agent__num_workers=2, agent__max_concurrent=3)
    workers = job.workers()
    job.policy.let(False)
    started = job.start(workers, 9)
    job.wait_for_requests(3)
    job.policy.let(True)
    assert len(ledgers(started)) == 9 and job.policy.tell("state")[0][1] == 3
    workers.close()


@pytest.mark.notices(
    "an episode worker may die as often as it likes",
    "rl/episode_workers.py",
    "            self.restarts.count(number, death)\n",
    "",
)
def test_unfinished_episodes_of_a_dead_worker_begin_anew_and_its_second_death_is_final(cluster, model, tmp_path, capfd):
    job = Job(tmp_path, model, agent__num_workers=2, agent__max_restarts=1)
    workers = job.workers()
    expected = ledgers(job.start(job.here(), 8))
    (tmp_path / "child").unlink(missing_ok=True)
    done = ledgers(job.start(workers, 8))  # a worker that is started again does not run them a second time
    started = job.start_held(workers, 8)
    asked = len(job.policy.asked)
    kill_actor(workers.members[1])
    job.wait_for_requests(asked + 4)  # the four of the dead worker ask again, and get other numbers
    job.policy.let(True)
    found = ledgers(started)
    assert content(done) == content(found) == content(expected)
    assert workers.restarts.counts == [0, 1]
    said = capfd.readouterr()
    assert "episode-worker-1 died during" in said.err and "(restart 1 of 1, agent.max_restarts)" in said.err
    assert "episode-worker-1 runs again: its 4 unfinished episodes start again" in said.out
    assert (job.logs / "episode-worker-1.log").read_text().count(" begins") == 12
    started = job.start_held(workers, 8)
    kill_actor(workers.members[1])
    with pytest.raises(ActorDied, match=r"(?s)episode-worker-1 died during \d episodes.*started again 1 times"):
        started[1].result(120)
    job.policy.let(True)
    assert content(ledgers(started[::2])) == content(expected[::2])
    workers.close()


@pytest.mark.notices(
    "an episode worker leaves alone what the dead one before it started",
    "rl/episode_worker.py",
    "        kill_marked(MARK, name)\n",
    "",
)
def test_what_an_episode_started_ends_with_its_worker(cluster, model, tmp_path):
    """A process that would live on alone, in a session of its own as MCP servers have, is killed by the next worker, or
    when the workers are closed."""
    job = Job(tmp_path, model, agent__num_workers=1)
    workers = job.workers()
    for end in (lambda: kill_actor(workers.members[0]), workers.close):
        ledgers(job.start(workers, 1, ["child"]))
        child = psutil.Process(int((tmp_path / "child").read_text()))
        assert child.is_running() and child.cmdline() == ["sleep", "1000"]
        end()
        if not workers.is_closed:
            (tmp_path / "child").unlink()
            ledgers(job.start(workers, 1, ["other"]))
        psutil.wait_procs([child], 30)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_file_that_cannot_be_imported_is_the_same_message_as_in_the_driver(cluster, model, tmp_path):
    job = Job(tmp_path, model, "import nowhere_to_be_found\n\nclass Environment: ...", agent__num_workers=1)
    messages = []
    for make in (job.here, job.workers):
        with pytest.raises(UserError) as raised:
            make()
        messages.append(str(raised.value))
    assert messages[0] == messages[1] and "nowhere_to_be_found" in messages[0]


def test_an_async_step_that_blocks_the_others_is_named_and_ends_the_run(cluster, model, tmp_path):
    code = CODE.replace("import os,", "import os, time,").replace("self.turns += 1", "time.sleep(86_400)")
    line = 1 + code.splitlines().index("        time.sleep(86_400)")
    job = Job(tmp_path, model, code, agent__num_workers=1, agent__tool_timeout_s=5.0)
    workers = job.workers()
    for future in job.start(workers, 3):
        with pytest.raises(UserError, match=rf"environment.py:{line} \(step\) has blocked all episodes for agent.tool"):
            future.result(60)
    assert "blocks all episodes of its process" in (job.logs / "episode-worker-0.log").read_text()
    workers.close()


def test_a_request_that_fails_ends_all_episodes_of_its_worker_and_those_of_no_other(cluster, model, tmp_path):
    job = Job(tmp_path, model, agent__num_workers=2)
    workers = job.workers()
    for _ in range(3):  # the numbers of requests run ahead of those of episodes
        expected = ledgers(job.start(workers, 4))
    started = job.start_held(workers, 4)
    job.policy.tell("have", broken=job.policy.asked[-4].seed)
    job.policy.let(True)
    fates = [failure(future) for future in started]
    assert sorted(fates, key=str) == [None, None, "the engine is gone", "the engine is gone"]
    survivors = [number for number, fate in enumerate(fates) if fate is None]
    assert content(ledgers([started[number] for number in survivors])) == content([expected[n] for n in survivors])
    workers.close()


def failure(future) -> str | None:
    error = future.exception(60)
    return None if error is None else str(error)


@pytest.mark.notices(
    "episode workers go on while the engines are paused",
    "rl/episode_workers.py",
    "await asyncio.gather(*(link.obey() for link in self.links))\n\n    async def resume",
    "pass\n\n    async def resume",
)
@pytest.mark.notices(
    "an episode worker in the place of a dead one does not know that the engines are paused",
    "rl/episode_workers.py",
    "pool.timeout_s, self.workers.is_paused)",
    "pool.timeout_s, False)",
)
def test_workers_pause_with_the_engines_also_one_that_is_started_again(cluster, model, tmp_path):
    job = Job(tmp_path, model, agent__num_workers=2)
    workers = job.workers()
    expected = ledgers(job.start(workers, 6))
    started = job.start_held(workers, 6)
    asked = len(job.policy.asked)
    job.policy.pause()
    assert job.policy.tell("ping") and len(job.policy.asked) == asked
    kill_actor(workers.members[0])
    log = job.logs / "episode-worker-0.log"
    assert poll_until(lambda: log.read_text().count(" begins") == 3 * 3, 180), "its episodes begin anew"
    job.policy.let(True)
    job.policy.loop.start(workers.pause()).result(60)  # this takes a turn of their loops, and changes nothing
    assert job.policy.tell("ping")
    assert len(job.policy.asked) == asked and not any(future.done() for future in started)
    job.policy.resume()
    assert content(ledgers(started)) == content(expected)
    workers.close()


@pytest.mark.notices(
    "an episode worker does not hear of the engine in the place of one that died",
    "rl/episode_workers.py",
    "            self.engines[report.engine] = answer\n",
    "            pass\n",
)
def test_turns_of_an_engine_that_dies_are_written_by_the_one_in_its_place(cluster, model, tmp_path):
    """Both workers find it dead, and it is started again once; its second death ends their episodes."""
    job = Job(tmp_path, model, agent__num_workers=2)
    workers = job.workers()
    expected = ledgers(job.start(workers, 6))
    for is_last in (False, True):
        started = job.start_held(workers, 6)
        kill_actor(job.policy.members[0])
        if not is_last:
            assert content(ledgers(started)) == content(expected)
            assert job.policy.restarts == 1
            continue
        assert all("started again 1 times" in str(failure(future)) for future in started)
    workers.close()


@pytest.mark.notices(
    "turns of episode workers all go to the first engine",
    "engines/requests.py",
    "return len(self.pending) + self.visits",
    "return len(self.pending)",
)
@pytest.mark.notices(
    "the timeline has no episodes of workers",
    "rl/episode_workers.py",
    "self.workers.timeline.add(result.intervals)",
    "pass",
)
@pytest.mark.proof
@pytest.mark.notices(
    "the tokens of episode workers are not counted",
    "rl/episode_workers.py",
    "self.workers.engines.count(result.prompt_tokens, result.cached_tokens)",
    "pass",
)
def test_engines_get_equal_shares_of_the_prompts_of_all_workers_and_all_turns_of_a_prompt(cluster, model, tmp_path):
    job = Job(tmp_path, model, agent__num_workers=2, engines=2)
    workers, timeline = job.workers(), Timeline()
    workers.record_in(timeline)
    started = job.start_held(workers, 8)
    job.policy.let(True)
    theirs, hits = ledgers(started), job.policy.cache_hits()
    assert content(theirs) == content(ledgers(job.start(job.here(), 8)))
    first = [asked[:12] for asked, _ in job.policy.tell("state")]
    assert [len(each) for each in first] == [12, 12]
    prompts = [{each.affinity for each in asked} for asked in first]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 8
    assert {each.who for each in timeline.intervals} == {"engines", "environments"}
    assert hits == job.policy.cache_hits() > 0, "the share is that of the same turns in the driver"
    workers.close()


GATE = """
        self.turns += 1
        if self.label in "abcd" and self.turns == 1:
            (HERE / f"waits-{self.label}").touch()
            await asyncio.to_thread(poll_until, (HERE / "gate").exists, 60)
"""


@pytest.mark.proof
def test_turns_of_a_real_engine_that_is_killed_are_the_same_and_its_second_death_is_final(
    cluster, model, tmp_path, capfd
):
    """It dies when four episodes have one turn of it, and others are under way. Both workers find it dead, and it is
    started again once."""
    spec = EngineSpec(model, "float32", "cpu", 256, 0, VLLMConfig.of("ppo", kv_cache_mb=32, max_restarts=1))
    code = CODE.replace("import os,", "import asyncio, os,").replace("\n        self.turns += 1\n", GATE)
    code = code.replace("HERE =", "from rlhf_suite.polling import poll_until\nHERE =")
    pool = start(spec, [Slot(0.1)], tmp_path / "logs", 120)
    job = Job(tmp_path, model, code, policy=pool, agent__num_workers=2)
    job.stop_ids += range(10, 50)  # so that turns end before they are cut off, which would end the episode
    pool.ready()
    workers, gate, labels = job.workers(), tmp_path / "gate", [*"abcd", *["free"] * 4]
    gate.touch()
    expected = ledgers(job.start(workers, 8, labels))
    assert {each.extra["agent/turns"] for each in expected} == {3.0}
    for is_last in (False, True):
        for file in (gate, *tmp_path.glob("waits-*")):
            file.unlink()
        started = job.start(workers, 8, labels)
        assert poll_until(lambda: len([*tmp_path.glob("waits-*")]) == 4, 60)
        kill_actor(pool.members[0])
        gate.touch()
        if is_last:
            said = [failure(future) for future in started[:4]]
            assert all("It had been started again 1 times (vllm.max_restarts=1)" in text for text in said)
        else:
            assert content(ledgers(started)) == content(expected)
            assert pool.restarts == 1 and workers.restarts.total == 0
            assert capfd.readouterr().err.count("(restart 1 of 1, vllm.max_restarts)") == 1
    workers.close()
    pool.retire()


@pytest.mark.proof
def test_an_error_of_the_engines_ends_the_episodes(cluster, model, tmp_path):
    job = Job(tmp_path, model, agent__num_workers=1)
    workers = job.workers()
    job.policy.tell("have", error=RunError("the engines are gone"))
    for future in job.start(workers, 3):
        with pytest.raises(RunError, match="the engines are gone"):
            future.result(60)
    workers.close()


@pytest.mark.notices(
    "workers do not report what they do when a step ends",
    "tracking/timeline.py",
    "        for bring in self.others:\n            bring()\n",
    "",
)
def test_a_step_has_what_workers_and_engines_do_at_its_end(cluster, model, tmp_path):
    """No turn is over, so nothing was reported before."""
    job = Job(tmp_path, model, agent__num_workers=2)
    workers, timeline, file = job.workers(), Timeline(), tmp_path / "timeline.jsonl"
    workers.record_in(timeline)
    started = job.start_held(workers, 4)
    asked = time.time()
    assert timeline.close_window(file)["perf/engine_idle"] < 1
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(row["who"] == "engines" and row["end"] >= asked for row in rows) == 2
    job.policy.let(True)
    ledgers(started)
    assert job.policy.cache_hits() > 0
    workers.close()
