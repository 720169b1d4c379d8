"""What clients have asked for, and in which order it is done.

A request gets a number at once (a future), and its answer is fetched by that number. Requests of a model are done in
the order of their sequence numbers, also where they arrive in another one, and each once; those that wait in vain for
an earlier number fail. The models take turns, but a model whose gradients wait for an optimiser step comes first.
Samples are drawn beside all of this, as long as the engines have their weights; new weights come when no sample of
older ones is under way.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rlhf_suite.errors import RunError, UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.serving.http_server import BadRequest
from rlhf_suite.train_server.steps import SAMPLING, Clock

T = TypeVar("T")
Answer = dict[str, Any] | bytes  # JSON, or a message of the protocol
MAX_FETCHED = 256  # answers that are kept after their first fetch: a client that has lost one asks again
MAX_ANSWERS = 20_000  # that are kept although nobody has fetched them
GAP_S = 120.0  # that a request waits for those with smaller numbers to arrive


@dataclass
class Job:
    """A request, and its answer once it is done."""

    number: str
    work: Callable[[], Awaitable[Answer]]
    model: str = ""  # empty: samples
    weights: str = ""  # what the engines need for samples
    changes_engines: bool = False
    phase: str = SAMPLING  # what its time counts for
    answer: Answer | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Line:
    """The requests of a model: the sequence number of the next one, and those that have arrived before it."""

    next: int = 1
    early: dict[int, Job] = field(default_factory=dict)


class Device(Protocol):
    """The models of a server, as the order of requests sees them."""

    sampled: str  # the weights that the engines have

    @property
    def unfinished(self) -> str:
        """Return the model whose gradients wait on the ranks for an optimiser step; empty: none."""
        ...

    def bring_to_engines(self, address: str) -> None:
        """Have the engines take weights."""
        ...


class Jobs:
    """Does what clients ask for of a device. `fail` is told of an error after which nothing more can be done."""

    def __init__(self, device: Device, fail: Callable[[RunError], None], clock: Clock, gap_s: float = GAP_S) -> None:
        self.device, self.fail, self.clock, self.gap_s = device, fail, clock, gap_s
        self.known: OrderedDict[str, Job] = OrderedDict()
        self.fetched: OrderedDict[str, None] = OrderedDict()  # the numbers of answers, the first fetch of each
        self.lines: dict[str, Line] = {}
        self.ready: deque[Job] = deque()
        self.has_jobs = asyncio.Event()
        self.samples: set[asyncio.Task[None]] = set()  # under way
        self.thread = ThreadPoolExecutor(1, "models")  # no-limit: a second signal ends a server

    def add(self, job: Job) -> Job:
        """Add a request that has no order among others."""
        known = self.known.setdefault(job.number, job)
        if known is job:
            self.append(job)
        return known

    def add_in_order(self, job: Job, seq: int) -> Job:
        """Add a request with a sequence number of its model. One that is sent again is the same request; raise
        BadRequest where it is over and its answer is no longer kept."""
        if job.number in self.known:
            return self.known[job.number]
        line = self.lines.setdefault(job.model, Line())
        if seq < line.next:
            raise BadRequest(
                f"seq_id={seq}: this request of {job.model} is over: either it was done and its answer is no longer "
                f"kept, or it has arrived too late. It is not done now; the next number is {line.next}"
            )
        self.known[job.number] = line.early[seq] = job
        while line.next in line.early:
            self.append(line.early.pop(line.next))
            line.next += 1
        if seq in line.early:
            asyncio.get_running_loop().call_later(self.gap_s, self.give_up, line, seq)
        return job

    def give_up(self, line: Line, seq: int) -> None:
        """Fail what waits after a number that has not arrived, since it was meant to come after that."""
        if seq not in line.early:
            return
        missing = line.next
        for number, job in sorted(line.early.items()):
            self.close(job, BadRequest(f"request {number} was not done: request {missing} has not arrived before it"))
        line.next = max(line.early) + 1
        line.early.clear()

    def append(self, job: Job) -> None:
        """Have a request done in its turn."""
        self.ready.append(job)
        self.has_jobs.set()
        oldest = next(iter(self.known.values()))
        if len(self.known) > MAX_ANSWERS and oldest.done.is_set():
            del self.known[oldest.number]

    async def fetch(self, number: str, limit_s: float) -> Answer | None:
        """Return the answer to a request; None if it is not there in time. Raise KeyError if there is no such request,
        or its answer is no longer kept."""
        job = self.known[number]
        try:
            await asyncio.wait_for(job.done.wait(), limit_s)  # no-limit: it has one
        except TimeoutError:
            return None
        self.fetched.setdefault(number, None)
        if len(self.fetched) > MAX_FETCHED:
            self.known.pop(self.fetched.popitem(last=False)[0], None)
        return job.answer

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, called in the thread that makes all calls of the models."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def run(self) -> None:
        """Do what is asked for until cancelled."""
        while True:
            await self.has_jobs.wait()
            job = self.take()
            if job is None:
                self.has_jobs.clear()
            elif job.weights:
                await self.start_sample(job)
            else:
                if job.changes_engines:
                    await self.end_samples()
                await self.finish(job)

    def take(self) -> Job | None:
        """Return the request whose turn it is."""
        first = self.device.unfinished
        chosen = next((job for job in self.ready if first and job.model == first), None)
        if chosen is None:
            return self.ready.popleft() if self.ready else None
        self.ready.remove(chosen)
        return chosen

    async def start_sample(self, job: Job) -> None:
        """Start to draw samples, once the engines have their weights."""
        if self.device.sampled != job.weights:
            await self.end_samples()
            try:
                with self.clock.during("weight_sync"):
                    await self.in_thread(lambda: self.device.bring_to_engines(job.weights))
            except Exception as error:
                self.close(job, error)
                return
        task = asyncio.create_task(self.finish(job))
        self.samples.add(task)
        task.add_done_callback(self.samples.discard)

    async def end_samples(self) -> None:
        """Wait until no sample is under way."""
        if self.samples:
            await asyncio.wait(self.samples)

    async def finish(self, job: Job) -> None:
        """Do a request."""
        try:
            with self.clock.during(job.phase):
                job.answer = await job.work()
            job.done.set()
        except Exception as error:
            self.close(job, error)

    def close(self, job: Job, error: Exception) -> None:
        """Answer a request that has failed."""
        is_users = isinstance(error, BadRequest | UserError)
        said = str(error) if is_users else f"{type(error).__name__}: {error}"
        job.answer = {"error": printable(said, 2000), "category": "user" if is_users else "server"}
        job.done.set()
        if isinstance(error, RunError):
            self.fail(error)
