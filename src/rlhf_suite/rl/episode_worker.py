"""One process that runs episodes of an agent: a Ray actor to which the driver sends episodes, and which asks the
engines itself. The driver hears of finished episodes, of engines that died, and now and then of what was done."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray

from rlhf_suite.agents.build import make_episodes, watch_calls
from rlhf_suite.agents.episodes import Episodes
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.data.generation import Generation, GenerationRequest, SamplingSettings, content_number
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.engines.requests import EngineClient
from rlhf_suite.errors import RunError
from rlhf_suite.launch.actor_log import Member, redirect_output
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.launch.processes import OF_EPISODE_WORKER as MARK
from rlhf_suite.launch.processes import kill_marked
from rlhf_suite.launch.wait import ActorDied
from rlhf_suite.models.load import load_tokenizer, vision_processor
from rlhf_suite.rl.sampling import stop_token_ids
from rlhf_suite.serving.chat_server import PROGRAMS, ChatServer
from rlhf_suite.tracking.timeline import Activity, Interval, Timeline
from rlhf_suite.waits import allow_silence, result

T = TypeVar("T")
Ledgers = list[Trajectory]
NO_PROMPT = Prompt([], "", "", "", "")  # in ledgers on their way back: the driver has the prompt
REPORT_S = 1.0  # between two reports of turns while no episode ends


@dataclass(frozen=True)
class EpisodeOrder:
    """An episode to run: the arguments of `Episodes.run`, and of `Episodes.limit_turns` where it is not None; `engine`
    is the number of the engine that writes its turns."""

    ledger: Trajectory
    sampling: SamplingSettings
    seed: tuple[int, ...]
    max_turns: int | None = None
    engine: int = 0


@dataclass(frozen=True)
class EngineAccess:
    """What a process needs to ask the engines: their handles, their names, the limit of a wait in seconds, and whether
    they are paused."""

    handles: Sequence[Any]
    members: Sequence[Member]
    timeout_s: float
    is_paused: bool


@dataclass(frozen=True)
class Report:
    """What a worker has done since its last report: when its engines and environments were busy, and how many tokens
    the prompts of its turns had, in all and in the caches of the engines."""

    intervals: Sequence[Interval]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class EngineDeath:
    """An engine that this worker found dead. The worker waits for the handle of another one in its place."""

    engine: int
    death: ActorDied


News = Ledgers | Report | EngineDeath


class EpisodeWorker:
    """Runs episodes as the driver would, in an event loop of the same kind, and asks the engines as it would. What the
    driver is to know leaves by `wait_for_finished`, all that there is at once.

    `model`: the folder of the policy, for its tokenizer. `name` is that of this worker alone: what a dead worker of
    this name has left running is ended.
    """

    def __init__(self, run: Run, model: str, name: str, log: Path | None = None) -> None:
        if log is not None:
            redirect_output(log)
        kill_marked(MARK, name)
        os.environ[MARK] = name
        allow_silence(run.launch.timeout_s)
        self._run, self._model, self._name = run, model, name
        self._logs = None if log is None else log.parent / PROGRAMS
        self._loop = LoopThread("episodes")
        self._episodes: Episodes | None = None
        self._engines: EngineClient | None = None
        self._timeline = Timeline()
        self._busy = Activity(self._timeline, "engines", "generation")
        self._turns = self._prompt_tokens = self._cached_tokens = 0  # since the last report
        self._outbox: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._replaced: dict[int, Future[Any]] = {}  # handles that the driver is to bring, by the number of the engine
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references

    async def ready(self) -> str:
        """Return the id of this node once episodes can begin. Raise UserError if they cannot."""
        self._episodes = await asyncio.to_thread(self._build)
        return str(ray.get_runtime_context().get_node_id())

    async def connect(self, engines: EngineAccess) -> None:
        """Ask these engines from now on. This comes before the first episode."""
        await self._on_loop(self._connect(engines))

    async def submit(self, client: str, bundle: Sequence[tuple[int, EpisodeOrder]]) -> None:
        """Begin episodes, each with a number."""
        await self._on_loop(self._begin(bundle))

    async def wait_for_finished(self, client: str) -> list[tuple[int, News]]:
        """Wait until there is something for the driver, and return all that there is: the ledgers of finished episodes
        with their numbers, engines that died, and a report at the end."""
        return await self._on_loop(self._news())

    async def report(self) -> Report:
        """Return what was done since the last report, until now."""

        async def make_report() -> Report:
            return self._report()

        return await self._on_loop(make_report())

    async def pause(self) -> None:
        """Interrupt the turns under way, which keep their tokens, and begin no others until `resume`."""
        assert self._engines is not None
        await self._on_loop(self._engines.pause())

    async def resume(self) -> None:
        """Go on after `pause`."""
        assert self._engines is not None
        await self._on_loop(self._engines.resume())

    async def replace(self, engine: int, handle: Any) -> None:
        """Take the handle of the engine in the place of one that died, or the error that there is none."""
        future = self._replaced.pop(engine)
        if isinstance(handle, Exception):
            future.set_exception(handle)
        else:
            future.set_result(handle)

    async def close(self) -> None:
        """End what the episodes have left running."""
        kill_marked(MARK, self._name)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the response of an engine to a request: this worker is the policy of its agent."""
        assert self._engines is not None
        response = await self._engines.generate(request, self._busy)
        self._turns += 1
        self._prompt_tokens += len(request.prompt_ids)
        self._cached_tokens += response.cached_tokens
        return response

    def _build(self) -> Episodes:
        run, tokenizer = self._run, load_tokenizer(self._model, self._run.data)
        vision = vision_processor(self._model, run.data.image_key)
        stop_ids = stop_token_ids(self._model, tokenizer)
        episodes = make_episodes(run, self, tokenizer, stop_ids, partial(ChatServer, logs=self._logs), vision)
        assert episodes is not None, "agent.num_workers needs an agent"
        episodes.record_in(self._timeline)
        watch_calls(self._loop, run.agent)
        return episodes

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop of the episodes, which is the driver's kind of loop and not that of Ray."""
        try:
            return await asyncio.wrap_future(self._loop.start(work))
        except ActorDied as death:  # of an engine for good: the driver would take it for the death of this worker
            raise RunError(str(death)) from None

    async def _connect(self, engines: EngineAccess) -> None:
        self._engines = EngineClient(engines.handles, engines.members, engines.timeout_s, self._replacement)
        if engines.is_paused:
            await self._engines.pause()

    def _replacement(self, engine: int, handle: Any, death: ActorDied) -> Any:
        """Have the driver bring the engine in the place of one that died; this runs on a thread of its own."""
        future = self._replaced[engine] = Future()
        self._loop.loop.call_soon_threadsafe(self._outbox.put_nowait, (engine, EngineDeath(engine, death)))
        return result(future, f"the restart of {death.name}")

    async def _begin(self, bundle: Sequence[tuple[int, EpisodeOrder]]) -> None:
        for number, order in bundle:
            task = asyncio.create_task(self._play(number, order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _play(self, number: int, order: EpisodeOrder) -> None:
        """Run one episode. An error of it is what the driver gets next."""
        episodes = self._episodes
        assert episodes is not None and self._engines is not None
        prompt = order.ledger.prompt
        self._engines.settle(content_number(prompt.ids, prompt.images or ()), order.engine)
        if order.max_turns is not None:
            episodes = episodes.limit_turns(order.max_turns)
        try:
            ledgers = await episodes.run(order.ledger, order.sampling, order.seed)
            result: Any = [replace(ledger, prompt=NO_PROMPT) for ledger in ledgers]
        except Exception as error:
            result = error
        self._outbox.put_nowait((number, result))

    async def _news(self) -> list[tuple[int, News]]:
        news = list[tuple[int, News]]()
        while not news and not self._turns:
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    news = [await self._outbox.get()]
        while not self._outbox.empty():
            news.append(self._outbox.get_nowait())
        for _, message in news:
            if isinstance(message, Exception):
                raise message
        return [*news, (0, self._report())]

    def _report(self) -> Report:
        report = Report(self._timeline.drain(), self._prompt_tokens, self._cached_tokens)
        self._turns = self._prompt_tokens = self._cached_tokens = 0
        return report
