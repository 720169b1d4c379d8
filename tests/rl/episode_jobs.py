"""Episodes of an environment in the driver and in workers, and an actor that stands in for an engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from plain_run import small

from given import prompt
from rlhf_suite.agents.build import make_episodes
from rlhf_suite.config.plan.run_plan import Machine, resolve
from rlhf_suite.data.generation import INTERRUPTED, Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.engines.spec import EngineInfo
from rlhf_suite.errors import RunError
from rlhf_suite.launch.actor_log import Member, redirect_output
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.polling import poll_until
from rlhf_suite.rl.episode_workers import EpisodeWorkers, start_episode_workers
from rlhf_suite.rl.sampling import stop_token_ids
from rlhf_suite.serving.chat_server import ChatServer

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

    async def ready(self) -> EngineInfo:
        return EngineInfo(startup_s=0.0, num_workers=1, kv_blocks=1, kv_tokens=16, node="127.0.0.1")

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

        def create(number: int, kv_blocks: int | None = None):
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

    def __init__(
        self,
        folder: Path,
        model: str,
        code: str = CODE,
        engines: int = 1,
        policy: EnginePool | None = None,
        **flags: Any,
    ) -> None:
        self.logs, file = folder / "logs", folder / "environment.py"
        folder.mkdir(exist_ok=True)
        file.write_text(code)
        given = {"actor__model_name_or_path": model, "train__agent_func_path": str(file), "reward__rule": None}
        self.run = small(agent__kind="environment", rollout__max_new_tokens=64, data__max_len=256, **given, **flags)
        self.policy: Any = policy or Policy(self.logs, engines)
        self.tokenizer = load_tokenizer(model, self.run.data)
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

    def start_held(self, episodes, count: int):
        """Start episodes whose first turns are asked for, and answered when the policy is let."""
        self.policy.let(False)
        asked = len(self.policy.asked)
        started = self.start(episodes, count)
        self.wait_for_requests(asked + count)
        return started


def ledgers(futures) -> list[Trajectory]:
    return [ledger for future in futures for ledger in future.result(120)]


def content(found: list[Trajectory]) -> list[dict]:
    """Return all that ledgers hold, but for the process in which they were made and the seconds of their turns."""
    rows = []
    for each in found:
        values = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in vars(each).items()}
        values["turn_records"] = [replace(turn, sampling_s=0.0, answer_s=0.0) for turn in each.turn_records]
        rows.append(values | {"extra": {name: v for name, v in each.extra.items() if name != "process"}})
    return rows
