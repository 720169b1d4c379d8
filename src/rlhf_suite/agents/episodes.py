"""The episodes of a run: which agent plays each of them, how many are under way, and what becomes of their outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from rlhf_suite.agents.base import Episode, Task
from rlhf_suite.agents.session import Session, Shared
from rlhf_suite.config.declarations.agent import ChosenAgent
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.rewards.base import Choice, RewardFailure, Scored
from rlhf_suite.tracking.timeline import Activity, Timeline
from rlhf_suite.waits import waiting

if TYPE_CHECKING:
    from rlhf_suite.agents.endpoint import Sessions


class EpisodeRunner(Protocol):
    """Runs episodes, in this process (`Episodes`) or in others (`rl.episode_workers`)."""

    def record_in(self, timeline: Timeline) -> None:
        """From now on, record there when environments are busy."""
        ...

    def limit_turns(self, max_turns: int) -> EpisodeRunner:
        """Return the episodes of the same agent with at most so many turns."""
        ...

    async def run(self, ledger: Trajectory, sampling: SamplingSettings, seed: tuple[int, ...]) -> list[Trajectory]:
        """Return the ledgers of one episode."""
        ...


class Agent(Protocol):
    """Runs episodes. One agent serves many episodes at once, so it keeps nothing of an episode."""

    def limit_turns(self, max_turns: int) -> Agent:
        """Return the same agent with at most so many turns of the model in an episode."""
        ...

    async def run(self, task: Task, session: Session) -> Episode:
        """Run one episode.

        A failure of the environment is an outcome; a failure of the engines is raised.
        """
        ...


@dataclass(frozen=True)
class AgentSetup:
    """What an agent is made from, by the function that `agent.kind` names."""

    chosen: ChosenAgent  # its flags (`chosen.config`), and its file
    must_score: bool = False  # the run has no reward source, so that the agent has to score each episode
    choice: Choice = field(default_factory=Choice)  # what of a reward in several parts is trained on
    serve: Callable[[str], Sessions] | None = None  # makes a server of chat completions at an address
    max_characters: int = 0  # a longer conversation cannot fit into data.max_len


class AgentsByDatasource:
    """Several agents in one run (agent.sources): each episode has the agent of its datasource, or else `others`."""

    def __init__(self, named: Mapping[str, Agent], others: Agent) -> None:
        self.named, self.others = named, others

    def limit_turns(self, max_turns: int) -> AgentsByDatasource:
        """Return the same agents, each with at most so many turns."""
        named = {datasource: agent.limit_turns(max_turns) for datasource, agent in self.named.items()}
        return AgentsByDatasource(named, self.others.limit_turns(max_turns))

    async def run(self, task: Task, session: Session) -> Episode:
        """Run one episode by the agent of its row."""
        return await self.named.get(task.datasource, self.others).run(task, session)


class SingleTurnAgent:
    """Runs episodes of one turn, which nobody answers: beside other agents, for rows that need none."""

    def limit_turns(self, max_turns: int) -> SingleTurnAgent:
        """Return this agent."""
        return self

    async def run(self, task: Task, session: Session) -> Episode:
        """Let the model write its turn."""
        if session.set_prompt(None, None):
            await session.reply()
        return session.episode(extra={"agent/turns": float(session.num_turns)})


class Episodes:
    """Runs the episodes of an agent, at most `limit` at a time. All calls must be made on one event loop."""

    def __init__(self, agent: Agent, shared: Shared, limit: int) -> None:
        self.agent, self.policy = agent, shared.policy
        self.shared = replace(shared, policy=self)
        self.slots = asyncio.Semaphore(limit)
        self.environments = Activity(Timeline(), "environments", "episodes")  # those that wait for no response

    def record_in(self, timeline: Timeline) -> None:
        """From now on, record there when environments are busy."""
        self.environments.timeline = timeline

    def limit_turns(self, max_turns: int) -> Episodes:
        """Return the episodes of the same agent with at most so many turns. They count towards the same limit."""
        result = copy(self)
        result.agent = self.agent.limit_turns(max_turns)
        return result

    async def run(self, ledger: Trajectory, sampling: SamplingSettings, seed: tuple[int, ...]) -> list[Trajectory]:
        """Let the agent continue a ledger that holds its prompt, and return the ledgers of the episode, the outcome in
        the last one.

        Equal numbers in `seed` give equal random numbers.
        """
        task = Task.of(ledger.prompt)
        async with self.slots:
            with self.environments, waiting(f"an episode of the prompt at {ledger.prompt.where}", alike="episode"):
                episode = await self.agent.run(task, Session(self.shared, task, ledger, seed, sampling))
        return with_outcome(episode)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the response to a request of an episode, which is not with its environment meanwhile."""
        self.environments.end()
        try:
            return await self.policy.generate(request)
        finally:
            self.environments.begin()


def with_outcome(episode: Episode) -> list[Trajectory]:
    """Return the ledgers of an episode, numbered, with its outcome and metrics in the last one; with roles, those of
    each of them."""
    for number, ledger in enumerate(episode.ledgers):
        ledger.fork = number
    ledger, outcome = episode.ledgers[-1], episode.outcome
    if isinstance(outcome, RewardFailure):
        ledger.failure = outcome.reason
    elif isinstance(outcome, Scored):
        ledger.reward, ledger.score = outcome.reward, outcome.score
    ledger.extra |= episode.extra
    return [*episode.ledgers, *chain.from_iterable(map(with_outcome, episode.others))]
