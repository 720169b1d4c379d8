"""One process that runs episodes of an agent: a Ray actor to which the driver sends episodes, and whose policy is the
driver."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import ray

from rlhf_suite.agents.build import make_episodes, watch_calls
from rlhf_suite.agents.episodes import Episodes
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.launch.actor_log import redirect_output
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.launch.processes import end_marked
from rlhf_suite.models.load import load_tokenizer, vision_processor
from rlhf_suite.rl.sampling import stop_token_ids
from rlhf_suite.serving.chat_server import ChatServer

T = TypeVar("T")
Ledgers = list[Trajectory]
NO_PROMPT = Prompt([], "", "", "", "")  # in ledgers on their way back: the driver has the prompt
MARK = "RLHF_SUITE_EPISODES"  # environment variable of all that a worker starts; its value is the name of the worker


@dataclass(frozen=True)
class EpisodeOrder:
    """An episode to run: the arguments of `Episodes.run`, and of `Episodes.limit_turns` where it is not None."""

    ledger: Trajectory
    sampling: SamplingSettings
    seed: tuple[int, ...]
    max_turns: int | None = None


class EpisodeWorker:
    """Runs episodes as the driver would, in an event loop of the same kind. What it wants of the driver (generations)
    and what it brings (the ledgers of finished episodes) leave by `finished`, all that there is at once.

    `model`: the folder of the policy, for its tokenizer. `name` is that of this worker alone: what a dead worker of
    this name has left running is ended.
    """

    def __init__(self, run: PPORun, model: str, name: str, log: Path | None = None) -> None:
        if log is not None:
            redirect_output(log)
        end_marked(MARK, name)
        os.environ[MARK] = name
        self._run, self._model, self._name = run, model, name
        self._loop = LoopThread("episodes")
        self._episodes: Episodes | None = None
        self._outbox: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[Generation]] = {}  # generations that the driver is to bring, by number
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references

    async def ready(self) -> str:
        """Return the id of this node once episodes can begin. Raise UserError if they cannot."""
        self._episodes = await asyncio.to_thread(self._build)
        return str(ray.get_runtime_context().get_node_id())

    async def submit(self, client: str, bundle: Sequence[tuple[int, EpisodeOrder]]) -> None:
        """Begin episodes, each with a number."""
        await self._on_loop(self._begin(bundle))

    async def finished(self, client: str) -> list[tuple[int, GenerationRequest | Ledgers]]:
        """Wait until there is something for the driver, and return all that there is: requests with numbers of this
        worker, and the ledgers of finished episodes with the numbers of these."""
        return await self._on_loop(self._news())

    async def answer(self, bundle: Sequence[tuple[int, Generation]]) -> None:
        """Take the responses to requests, by their numbers."""
        await self._on_loop(self._take(bundle))

    async def close(self) -> None:
        """End what the episodes have left running."""
        end_marked(MARK, self._name)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Ask the driver for the response to a request: this is the policy of the agent."""
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait((number, request))
        return await self._asked[number]

    def _build(self) -> Episodes:
        run, tokenizer = self._run, load_tokenizer(self._model, self._run.data)
        vision = vision_processor(self._model, run.data.image_key)
        stop_ids = stop_token_ids(self._model, tokenizer)
        episodes = make_episodes(run, self, tokenizer, stop_ids, ChatServer, vision)
        assert episodes is not None, "agent.num_workers needs an agent"
        watch_calls(self._loop, run.agent)
        return episodes

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop of the episodes, which is the driver's kind of loop and not that of Ray."""
        return await asyncio.wrap_future(self._loop.start(work))

    async def _begin(self, bundle: Sequence[tuple[int, EpisodeOrder]]) -> None:
        for number, order in bundle:
            task = asyncio.create_task(self._play(number, order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _play(self, number: int, order: EpisodeOrder) -> None:
        """Run one episode. An error of it is what the driver gets next."""
        episodes = self._episodes
        assert episodes is not None
        if order.max_turns is not None:
            episodes = episodes.limit_turns(order.max_turns)
        try:
            ledgers = await episodes.run(order.ledger, order.sampling, order.seed)
            found: Any = [replace(ledger, prompt=NO_PROMPT) for ledger in ledgers]
        except Exception as error:
            found = error
        self._outbox.put_nowait((number, found))

    async def _news(self) -> list[tuple[int, GenerationRequest | Ledgers]]:
        news = [await self._outbox.get()]
        while not self._outbox.empty():
            news.append(self._outbox.get_nowait())
        for _, each in news:
            if isinstance(each, Exception):
                raise each
        return news

    async def _take(self, bundle: Sequence[tuple[int, Generation]]) -> None:
        for number, generation in bundle:
            self._asked.pop(number).set_result(generation)
