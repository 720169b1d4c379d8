"""The episodes of a run in processes of their own (agent.num_workers), as the driver sees them.

An episode goes to the worker that has the fewest, and its turns to the engine that has the fewest. The worker asks this
engine itself, so turns do not pass the driver. The driver pauses the workers with the engines, starts engines again
that workers find dead, and gets reports of what was done, now and then and when a step ends. If a worker dies, another
one is started in its place, and its unfinished episodes begin again with their prompts and seeds.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_suite.background import in_background
from rlhf_suite.config.declarations.agent import AgentConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, Plan
from rlhf_suite.data.generation import SamplingSettings, content_number
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.errors import RunError
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.environment import runtime_env
from rlhf_suite.launch.link import Link, Restarts
from rlhf_suite.launch.wait import ActorDied, wait_for
from rlhf_suite.rl.episode_worker import EngineAccess, EngineDeath, EpisodeOrder, EpisodeWorker, Report
from rlhf_suite.tracking.timeline import Timeline
from rlhf_suite.waits import result, waiting

CLOSE_S = 5.0  # a worker that has not ended its children in this time is killed all the same
REPORT_S = 1.0  # a worker that does not report in this time, since code of the user blocks it, is counted later


class EpisodeWorkers:
    """Runs the episodes of an agent in several processes, at most agent.max_concurrent at a time in all.

    `create(i, node)` starts worker i: on this node if it can be there, or (None) anywhere. All other calls than
    `ready`, `record_in` and `close` must be made on the event loop of `engines`.
    """

    def __init__(
        self,
        create: Callable[[int, str | None], Any],
        members: Sequence[Member],
        engines: EnginePool,
        config: AgentConfig,
        timeout_s: float,
    ) -> None:
        self.create, self.members, self.timeout_s = create, members, timeout_s
        self.restarts = Restarts(len(members), config.max_restarts, "agent.max_restarts")
        self.is_closed = self.is_paused = False
        self.nodes: list[str | None] = [None] * len(members)
        self.slots = asyncio.Semaphore(config.max_concurrent)
        self.max_turns: int | None = None  # of an episode; None: agent.max_turns
        self.timeline = Timeline()
        self.engines, self.episode_s = engines, config.timeout_s
        self.links = [EpisodeLink(self, number) for number in range(len(members))]
        engines.clients.append(self)

    def ready(self) -> None:
        """Wait until all workers can run episodes. One that dies while it starts is not started again."""
        refs = [link.handle.ready.remote() for link in self.links]
        self.nodes = wait_for(refs, "the start of the episode workers", self.timeout_s, self.members)

    def limit_turns(self, max_turns: int) -> EpisodeWorkers:
        """Return the episodes of the same agent with at most so many turns. They count towards the same limit."""
        result = copy(self)
        result.max_turns = max_turns
        return result

    async def run(self, ledger: Trajectory, sampling: SamplingSettings, seed: tuple[int, ...]) -> list[Trajectory]:
        """Do as `Episodes.run` does, in the worker that has the fewest episodes."""
        prompt = ledger.prompt
        async with self.slots:
            link = min(self.links, key=lambda link: len(link.pending))
            activity = f"an episode of the prompt at {prompt.where}"
            affinity = content_number(prompt.ids, prompt.images or ())
            with self.engines.client.visit(affinity) as engine, waiting(activity, [link.member.name], alike="episode"):
                return await link.send(EpisodeOrder(ledger, sampling, seed, self.max_turns, engine))

    def record_in(self, timeline: Timeline) -> None:
        """From now on, record there when the engines and environments of the workers are busy."""
        self.timeline = timeline
        timeline.others.append(lambda: result(self.engines.start(self.report()), "the reports of the episode workers"))

    async def report(self) -> None:
        """Have all workers report what they have done until now."""
        reports = [link.start(link.report()) for link in self.links]
        for done in (await asyncio.wait(reports, timeout=REPORT_S))[0]:
            done.result()  # no-limit: it is done

    async def pause(self) -> None:
        """Interrupt the turns under way in all workers, and let none begin until `resume`."""
        self.is_paused = True
        await asyncio.gather(*(link.obey() for link in self.links))

    async def resume(self) -> None:
        """Let all workers go on after `pause`."""
        self.is_paused = False
        await asyncio.gather(*(link.obey() for link in self.links))

    def replacement(self, number: int, handle: Any, death: ActorDied) -> Any:
        """Return the worker in the place of `handle`, the worker `number` that died. May be called on any thread.

        Raises:
            ActorDied: the worker died more often than it may be started again.
        """
        while True:
            if self.is_closed:
                raise death
            self.restarts.count(number, death)
            ray.kill(handle)  # a process that only lost its connection must not stay
            handle = self.create(number, self.nodes[number])
            try:
                activity, members = "the start of the episode workers", [self.members[number]]
                self.nodes[number] = wait_for([handle.ready.remote()], activity, self.timeout_s, members)[0]
                return handle
            except ActorDied as another:
                death = another

    def close(self) -> None:
        """End the workers and what their episodes left running."""
        self.is_closed = True
        handles = [link.handle for link in self.links]
        with suppress(RunError):
            wait_for(
                [handle.close.remote() for handle in handles], "the episode workers to stop", CLOSE_S, self.members
            )
        for handle in handles:
            ray.kill(handle)


class EpisodeLink(Link[EpisodeOrder, list[Trajectory]]):
    """The connection to one worker. A worker first gets the handles of the engines; a later one in its place does too.
    Beside the results of episodes come reports, and engines that died."""

    doing = "episodes"
    again = "episodes start again"
    result_flags = "agent.timeout_s + launch.timeout_s"  # an episode ends within the first, so there is news of one

    def __init__(self, workers: EpisodeWorkers, number: int) -> None:
        handle, replacement = workers.create(number, None), partial(workers.replacement, number)
        super().__init__(handle, workers.members[number], workers.timeout_s, replacement)
        self.result_s += workers.episode_s
        self.workers = workers
        self.connected: Any = None  # the worker that has the handles of the engines
        self.engines: list[Any] = []  # these handles
        self.telling = asyncio.Lock()  # what the worker was told last is how the workers are

    async def submit(self, bundle: list[tuple[int, EpisodeOrder]]) -> None:
        """Do as `Link.submit` does, to a worker that has the handles of the engines."""
        handle = self.handle
        try:
            await self.connect(handle)
        except ActorDied as death:
            await self.recover(handle, death)
        except Exception as error:
            self.fail([number for number, _ in bundle], error)
        else:
            await super().submit(bundle)

    async def connect(self, handle: Any) -> None:
        """Give the worker the handles of the engines, unless it has them."""
        async with self.telling:
            if self.connected is not handle:
                pool = self.workers.engines
                engines = pool.handles
                access = EngineAccess(engines, pool.members, pool.timeout_s, self.workers.is_paused)
                await self.call(handle.connect.remote(access), "the connection to the engines")
                self.connected, self.engines = handle, engines

    async def obey(self) -> None:
        """Pause the worker, or let it go on, as all workers are to. One that has no engines yet hears of it with
        them."""
        handle = self.handle
        try:
            async with self.telling:
                if self.connected is handle and not self.is_waiting:
                    method = handle.pause if self.workers.is_paused else handle.resume
                    await self.call(method.remote(), "the pause of the engines")
        except ActorDied as death:
            await self.recover(handle, death)

    async def report(self) -> None:
        """Have the worker report what it has done until now. One that has no engines yet has done nothing."""
        handle = self.handle
        try:
            if self.connected is handle and not self.is_waiting:
                self.take(0, await self.call(handle.report.remote(), "a report"))
        except ActorDied as death:
            self.start(self.recover(handle, death))

    def take(self, number: int, result: Any) -> None:
        """Take what the worker says: a report, an engine that died, or the ledgers of an episode."""
        if isinstance(result, Report):
            self.workers.timeline.add(result.intervals)
            self.workers.engines.count(result.prompt_tokens, result.cached_tokens)
        elif isinstance(result, EngineDeath):
            self.start(self.replace(self.handle, result))
        else:
            order = self.orders.get(number)  # None: nobody waits for it any more
            super().take(number, [give_prompt(ledger, order.ledger.prompt) for ledger in result] if order else [])

    async def replace(self, handle: Any, report: EngineDeath) -> None:
        """Bring the worker the engine in the place of one that it found dead, or the error that there is none."""
        pool, dead = self.workers.engines, self.engines[report.engine]
        restart = in_background("restart", lambda: pool.replacement(report.engine, dead, report.death))
        try:
            answer = await asyncio.wrap_future(restart)
        except Exception as error:
            answer = error
        if handle is not self.handle or self.is_waiting:
            return  # the worker itself has died meanwhile
        if not isinstance(answer, Exception):
            self.engines[report.engine] = answer
        try:
            await self.call(handle.replace.remote(report.engine, answer), "the restart of an engine")
        except ActorDied as death:
            await self.recover(handle, death)
        except Exception as error:
            self.fail([*self.pending], error)


def give_prompt(ledger: Trajectory, prompt: Prompt) -> Trajectory:
    """Return a ledger of a worker with its prompt, and with arrays of this process: those that Ray has brought cannot
    be changed, and stay in its store as long as they are used."""
    arrays: dict[str, Any] = {
        name: value.copy() for name, value in vars(ledger).items() if isinstance(value, np.ndarray)
    }
    return replace(ledger, prompt=prompt, **arrays)


def start_episode_workers(run: Run, plan: Plan, engines: EnginePool, log_dir: Path) -> EpisodeWorkers | None:
    """Start the processes that run the episodes of a run; None if the driver runs them. Does not wait.

    They take no CPU of Ray's count: where all CPUs of a small machine are taken, they share them."""
    config = run.agent
    if not config.has_workers:
        return None
    members = [Member(f"episode-worker-{i}", log_dir / f"episode-worker-{i}.log") for i in range(config.num_workers)]
    environment, own = {"env_vars": runtime_env(plan.device)}, uuid.uuid4().hex

    def create(number: int, node: str | None) -> Any:
        place = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=True)
        worker = ray.remote(EpisodeWorker).options(num_cpus=0, scheduling_strategy=place, runtime_env=environment)
        return worker.remote(run, plan.models[ACTOR].path, f"{own}-{number}", members[number].log.absolute())

    return EpisodeWorkers(create, members, engines, run.agent, run.launch.timeout_s)
