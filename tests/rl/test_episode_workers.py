"""Episodes in real processes of their own: what they are given, what they give back, and what becomes of them when one
dies."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from plain_run import small

from given import prompt
from rlhf_suite.agents.build import make_episodes
from rlhf_suite.config.plan import Machine, resolve
from rlhf_suite.data.generation import INTERRUPTED, Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.actor_log import Member, redirect_output
from rlhf_suite.launch.wait import ActorDied
from rlhf_suite.models.builtin import create_tiny
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.polling import poll_until
from rlhf_suite.rl.episode_workers import EpisodeWorkers, start_episode_workers
from rlhf_suite.rl.sampling import stop_token_ids
from rlhf_suite.serving.chat_server import ChatServer
from rlhf_suite.tracking.timeline import Timeline

pytestmark = pytest.mark.stack

CODE = """
import os, subprocess
from pathlib import Path
from rlhf_suite.agents.base import Start, Step

HERE = Path(__file__).parent

class Environment:
    async def reset(self, task):
        self.label, self.turns = task.label, 0
        print("an episode of", task.label, "begins", flush=True)
        if task.label == "child" and not (HERE / "child").exists():
            process = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL, start_new_session=True)
            (HERE / "child").write_text(str(process.pid))
        return Start(text=f"{task.text} of {task.label}: ")

    async def step(self, turn):
        self.turns += 1
        where = {"process": float(os.getpid())}
        return Step(text=" more ", reward=len(turn.ids) / 8, done=self.turns == 3, extra=where)

    async def close(self): ...
"""


@pytest.fixture(scope="module")
def cluster(request):
    ray.cloudpickle.register_pickle_by_value(request.module)
    ray.init(address="local", include_dashboard=False, object_store_memory=100 << 20, num_cpus=1, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    create_tiny(folder)
    return str(folder)


class Writer:
    """An engine that writes tokens which follow from the seed and the prompt alone, while it is let."""

    def __init__(self, log: Path) -> None:
        redirect_output(log)
        self.asked: list[GenerationRequest] = []
        self.may_answer, self.interrupted = asyncio.Event(), asyncio.Event()
        self.answering = self.most = 0  # requests at a time
        self.error: Exception | None = None
        self.broken: int | None = None  # the seed of a request that fails
        self.outboxes: dict[str, asyncio.Queue] = {}
        self.tasks: set[asyncio.Task] = set()
        self.may_answer.set()

    async def submit(self, client: str, requests) -> None:
        outbox = self.outboxes.setdefault(client, asyncio.Queue())
        for number, request in requests:
            self.asked.append(request)
            task = asyncio.create_task(self.write(outbox, number, request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def write(self, outbox: asyncio.Queue, number: int, request: GenerationRequest) -> None:
        self.answering += 1
        self.most = max(self.most, self.answering)
        waits = [asyncio.create_task(event.wait()) for event in (self.may_answer, self.interrupted)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self.answering -= 1
        draw = np.random.default_rng([request.seed, *request.prompt_ids])
        count = min(request.max_new_tokens, 2 + request.seed % 5) if self.may_answer.is_set() else 0
        ids, log_probs = draw.integers(20, 80, count, np.int32), -draw.random(count).astype(np.float32)
        ids[-1:] = request.sampling.stop_token_ids[0]
        reason = "stop" if count else INTERRUPTED
        failed = request.seed == self.broken
        response: Any = Generation(request.id, ids, log_probs, reason, np.full(count, 7, np.int32), cached_tokens=1)
        outbox.put_nowait((number, self.error or (RunError("the engine is gone") if failed else response)))

    async def wait_for_finished(self, client: str):
        done = [await self.outboxes[client].get()]
        for _, response in done:
            if isinstance(response, Exception):
                raise response
        return done

    async def interrupt(self) -> None:
        self.interrupted.set()
        while self.answering:
            await asyncio.sleep(0)
        self.interrupted.clear()

    async def ping(self) -> None: ...

    async def ready(self) -> None: ...

    async def let(self, answer: bool) -> None:
        (self.may_answer.set if answer else self.may_answer.clear)()

    async def have(self, **values) -> None:
        vars(self).update(values)

    async def state(self) -> tuple[list[GenerationRequest], int]:
        return self.asked, self.most


class Policy(EnginePool):
    """Engines that stand in, and what they were asked."""

    def __init__(self, logs: Path, engines: int) -> None:
        members = [Member(f"engine-{number}", logs / f"engine-{number}.log") for number in range(engines)]

        def create(number: int):
            return ray.remote(Writer).options(num_cpus=0).remote(members[number].log.absolute())

        super().__init__([create(number) for number in range(engines)], members, 120, create, max_restarts=1)

    def tell(self, method: str, *args, **values) -> list:
        return ray.get([getattr(handle, method).remote(*args, **values) for handle in self.handles], timeout=60)

    def let(self, answer: bool) -> None:
        self.tell("let", answer)

    @property
    def asked(self) -> list[GenerationRequest]:
        return [each for asked, _ in self.tell("state") for each in asked]


class Job:
    """A run with an environment, its policy, and its workers if it has any. `folder` holds its files."""

    def __init__(self, folder: Path, model: str, code: str = CODE, engines: int = 1, **flags) -> None:
        self.logs, file = folder / "logs", folder / "environment.py"
        folder.mkdir(exist_ok=True)
        file.write_text(code)
        given = {"actor__model_name_or_path": model, "train__agent_func_path": str(file), "reward__rule": None}
        self.run = small(agent__kind="environment", rollout__max_new_tokens=64, data__max_len=256, **given, **flags)
        self.policy, self.tokenizer = Policy(self.logs, engines), load_tokenizer(model, self.run.data)
        self.stop_ids = stop_token_ids(model, self.tokenizer)

    def workers(self) -> EpisodeWorkers:
        workers = start_episode_workers(self.run, resolve(self.run, Machine("cpu", 0)), self.policy, self.logs)
        assert workers is not None
        workers.ready()
        return workers

    def here(self):
        return make_episodes(self.run, self.policy, self.tokenizer, self.stop_ids, ChatServer)

    def start(self, episodes, count: int, labels: str = "abc"):
        """Start episodes, and return the futures of their ledgers."""
        sampling = SamplingSettings(stop_token_ids=tuple(self.stop_ids))
        found = []
        for number in range(count):
            text = f"number {number}"
            task = prompt(number, self.tokenizer(text)["input_ids"], text, label=labels[number % len(labels)])
            ledger = Trajectory.start(task, number // 2, number % 2)
            found.append(self.policy.loop.start(episodes.run(ledger, sampling, (5, 0, 8, number))))
        return found

    def wait_for_requests(self, count: int) -> None:
        assert poll_until(lambda: len(self.policy.asked) >= count, 60), len(self.policy.asked)


def ledgers(futures) -> list[Trajectory]:
    return [ledger for future in futures for ledger in future.result(120)]


def content(found: list[Trajectory]) -> list[dict]:
    """Return all that ledgers hold, but for the process in which they were made."""
    rows = []
    for each in found:
        values = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in vars(each).items()}
        rows.append(values | {"extra": {name: v for name, v in each.extra.items() if name != "process"}})
    return rows


def processes(found: list[Trajectory]) -> set[int]:
    return {int(each.extra["process"]) for each in found}


@pytest.mark.notices(
    "ledgers of episode workers cannot be changed", "rl/episode_workers.py", "name: each.copy()", "name: each"
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


def kill(workers: EpisodeWorkers | EnginePool, number: int) -> None:
    """Kill the process of a worker or an engine, known by the log that its output goes to."""
    log = workers.members[number].log.resolve()
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError):
            if Path(f"/proc/{process.pid}/fd/1").readlink() == log:
                os.kill(process.pid, signal.SIGKILL)
                return
    raise AssertionError(f"nobody writes to {log}")


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
    asked = len(job.policy.asked)
    job.policy.let(False)
    started = job.start(workers, 8)
    job.wait_for_requests(asked + 8)
    kill(workers, 1)
    job.wait_for_requests(asked + 12)  # the four of the dead worker ask again, and get other numbers
    job.policy.let(True)
    found = ledgers(started)
    assert content(done) == content(found) == content(expected)
    assert workers.restarts.counts == [0, 1]
    said = capfd.readouterr()
    assert "episode-worker-1 died during" in said.err and "(restart 1 of 1, agent.max_restarts)" in said.err
    assert "episode-worker-1 runs again: its 4 unfinished episodes begin anew" in said.out
    assert (job.logs / "episode-worker-1.log").read_text().count(" begins") == 12
    job.policy.let(False)
    started = job.start(workers, 8)
    job.wait_for_requests(asked + 8 * 3 + 4 + 8)
    kill(workers, 1)
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
    for end in (lambda: kill(workers, 0), workers.close):
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
    job.policy.let(False)
    asked = len(job.policy.asked)
    started = job.start(workers, 4)
    job.wait_for_requests(asked + 4)
    job.policy.tell("have", broken=job.policy.asked[asked].seed)
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
    job.policy.let(False)
    asked = len(job.policy.asked)
    started = job.start(workers, 6)
    job.wait_for_requests(asked + 6)
    job.policy.pause()
    assert job.policy.tell("ping") and len(job.policy.asked) == asked + 6
    kill(workers, 0)
    log = job.logs / "episode-worker-0.log"
    assert poll_until(lambda: log.read_text().count(" begins") == 3 * 3, 180), "its episodes begin anew"
    job.policy.let(True)
    job.policy.loop.start(workers.pause()).result(60)  # this takes a turn of their loops, and changes nothing
    assert job.policy.tell("ping")
    assert len(job.policy.asked) == asked + 6 and not any(future.done() for future in started)
    job.policy.resume()
    assert content(ledgers(started)) == content(expected)
    workers.close()


@pytest.mark.notices(
    "an episode worker does not hear of the engine in the place of one that died",
    "rl/episode_workers.py",
    "            self.engines[found.engine] = answer\n",
    "            pass\n",
)
def test_turns_of_an_engine_that_dies_are_written_by_the_one_in_its_place(cluster, model, tmp_path):
    """Both workers find it dead, and it is started again once; its second death ends their episodes."""
    job = Job(tmp_path, model, agent__num_workers=2)
    workers = job.workers()
    expected = ledgers(job.start(workers, 6))
    for is_last in (False, True):
        job.policy.let(False)
        asked = len(job.policy.asked)
        started = job.start(workers, 6)
        job.wait_for_requests(asked + 6)
        kill(job.policy, 0)
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
    job.policy.let(False)
    started = job.start(workers, 8)
    job.wait_for_requests(8)
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


def test_an_error_of_the_engines_ends_the_episodes(cluster, model, tmp_path):
    job = Job(tmp_path, model, agent__num_workers=1)
    workers = job.workers()
    job.policy.tell("have", error=RunError("the engines are gone"))
    for future in job.start(workers, 3):
        with pytest.raises(RunError, match="the engines are gone"):
            future.result(60)
    workers.close()
