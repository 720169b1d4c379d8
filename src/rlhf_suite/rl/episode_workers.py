"""The episodes of a run in processes of their own (agent.num_workers), as the driver sees them.

An episode goes to the worker that has the fewest. Its requests come back to the driver, which makes them with its own
engines: so seeds, pauses, restarts of engines and weight versions are as for episodes in the driver. If a worker dies,
another one is started in its place, and its unfinished episodes begin anew with their prompts and seeds.
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

from rlhf_suite.agents.session import Policy
from rlhf_suite.config.agent import AgentConfig
from rlhf_suite.config.plan import ACTOR, Plan
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.errors import RunError
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.environment import runtime_env
from rlhf_suite.launch.link import Bundle, Link, Restarts
from rlhf_suite.launch.wait import ActorDied, wait_for
from rlhf_suite.rl.episode_worker import EpisodeOrder, EpisodeWorker
from rlhf_suite.tracking.timeline import Activity, Timeline
from rlhf_suite.waits import waiting

CLOSE_S = 5.0  # a worker that has not ended its children in this time is killed all the same


class EpisodeWorkers:
    """Runs the episodes of an agent in several processes, at most agent.max_concurrent at a time in all.

    `create(i, node)` starts worker i: on this node if it can be there, or (None) anywhere. All other calls than
    `ready` and `close` must be made on the event loop of `policy`, which makes the requests of the episodes.
    """

    def __init__(
        self,
        create: Callable[[int, str | None], Any],
        members: Sequence[Member],
        policy: Policy,
        config: AgentConfig,
        timeout_s: float,
    ) -> None:
        self.create, self.members, self.timeout_s = create, members, timeout_s
        self.restarts = Restarts(len(members), config.max_restarts, "agent.max_restarts")
        self.is_closed = False
        self.nodes: list[str | None] = [None] * len(members)
        self.slots = asyncio.Semaphore(config.max_concurrent)
        self.max_turns: int | None = None  # of an episode; None: agent.max_turns
        self.environments = Activity(Timeline(), "environments", "episodes")  # those that wait for no response
        self.policy, self.episode_s = policy, config.timeout_s
        self.links = [EpisodeLink(self, number) for number in range(len(members))]

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
        order = EpisodeOrder(ledger, sampling, seed, self.max_turns)
        async with self.slots:
            link = min(self.links, key=lambda link: len(link.pending))
            what = f"an episode of the prompt at {ledger.prompt.where}"
            with self.environments, waiting(what, [link.member.name], alike="episode"):
                return await link.send(order)

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
                what, members = "the start of the episode workers", [self.members[number]]
                self.nodes[number] = wait_for([handle.ready.remote()], what, self.timeout_s, members)[0]
                return handle
            except ActorDied as another:
                death = another

    def close(self) -> None:
        """End the workers and what their episodes left running."""
        self.is_closed = True
        handles = [link.handle for link in self.links]
        with suppress(RunError):
            wait_for([each.close.remote() for each in handles], "the episode workers to stop", CLOSE_S, self.members)
        for handle in handles:
            ray.kill(handle)


class EpisodeLink(Link[EpisodeOrder, list[Trajectory]]):
    """The connection to one worker. The worker's requests come with the results of its episodes, and go to the policy.
    Episodes with a request under way are not with their environments."""

    doing = "episodes"
    again = "episodes begin anew"
    result_flags = "agent.timeout_s + launch.timeout_s"  # an episode ends within the first, so there is news of one

    def __init__(self, workers: EpisodeWorkers, number: int) -> None:
        handle, replacement = workers.create(number, None), partial(workers.replacement, number)
        super().__init__(handle, workers.members[number], workers.timeout_s, replacement)
        self.result_s += workers.episode_s
        self.policy, self.environments = workers.policy, workers.environments
        self.answers: Bundle[tuple[int, Generation]] = Bundle(self.bring)
        self.asking: set[asyncio.Task[None]] = set()

    def take(self, number: int, result: Any) -> None:
        """Take what the worker says: a request, or the ledgers of an episode."""
        if isinstance(result, GenerationRequest):
            task = self.start(self.ask(number, result))
            self.asking.add(task)
            task.add_done_callback(self.asking.discard)
        else:
            order = self.orders.get(number)  # None: nobody waits for it any more
            super().take(number, [owned(ledger, order.ledger.prompt) for ledger in result] if order else [])

    async def ask(self, number: int, request: GenerationRequest) -> None:
        """Have the policy respond to a request of the worker. If the policy fails, so do all episodes."""
        self.environments.end()
        try:
            # A worker that dies leaves its requests alone: others may be in the same bundle.
            generation = await asyncio.shield(self.policy.generate(request))
        except Exception as error:
            self.fail([*self.pending], error)
        else:
            self.answers.add((number, generation))
        finally:
            self.environments.begin()

    def bring(self, bundle: list[tuple[int, Generation]]) -> None:
        """Send responses to the worker that asked for them."""
        if not self.is_waiting:
            self.start(self.answer(self.handle, bundle))

    async def answer(self, handle: Any, bundle: list[tuple[int, Generation]]) -> None:
        """Send responses, and wait until they have arrived."""
        try:
            await self.call(handle.answer.remote(bundle), f"{len(bundle)} turns")
        except ActorDied as death:
            await self.recover(handle, death)
        except Exception as error:
            self.fail([*self.pending], error)

    def forget(self) -> None:
        """Forget what the worker that died has asked for: the numbers of its requests come again."""
        for task in self.asking:
            task.cancel()
        self.answers.items = []


def owned(ledger: Trajectory, prompt: Prompt) -> Trajectory:
    """Return a ledger of a worker with its prompt, and with arrays of this process: those that Ray has brought cannot
    be changed, and stay in its store as long as they are used."""
    arrays: dict[str, Any] = {name: each.copy() for name, each in vars(ledger).items() if isinstance(each, np.ndarray)}
    return replace(ledger, prompt=prompt, **arrays)


def start_episode_workers(run: PPORun, plan: Plan, policy: Policy, log_dir: Path) -> EpisodeWorkers | None:
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

    return EpisodeWorkers(create, members, policy, run.agent, run.launch.timeout_s)
