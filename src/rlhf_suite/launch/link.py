"""The connection to one actor, and to the one that takes its place if it dies: orders go out and results come back in
bundles, and who waits for the result of an order that a dead actor had notices nothing.

The actor has two asynchronous methods. `submit(name, [(number, order), ...])` begins orders of the connection `name`,
and `wait_for_finished(name)` waits until some of them are finished and returns [(number, result), ...].
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any, ClassVar, Generic, TypeVar

import ray

from rlhf_suite.background import in_background
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.lost_nodes import has_lost_its_node
from rlhf_suite.launch.wait import ActorDied, reply
from rlhf_suite.tracking.console import show_line
from rlhf_suite.waits import LIMIT

T = TypeVar("T")
Order = TypeVar("Order")
Result = TypeVar("Result")


class Bundle(Generic[T]):
    """Collects what is added in one turn of the event loop, and passes it on together."""

    def __init__(self, pass_on: Callable[[list[T]], None]) -> None:
        self.pass_on = pass_on
        self.items: list[T] = []

    def add(self, item: T) -> None:
        """Add something to the bundle of this turn."""
        if not self.items:
            asyncio.get_running_loop().call_soon(self.flush)
        self.items.append(item)

    def flush(self) -> None:
        """Pass on what waits."""
        items, self.items = self.items, []
        if items:
            self.pass_on(items)


class Link(Generic[Order, Result]):
    """The connection to one actor. All calls must be made on one event loop.

    `replacement` gets the handle of the actor and how it died; it returns the handle of the actor in its place.
    """

    doing: ClassVar[str]  # what the actor does, in the plural
    again: ClassVar[str]  # what becomes of the unfinished orders of a dead actor
    result_flags: ClassVar[str] = LIMIT  # the flags that limit a wait for results

    def __init__(
        self, handle: Any, member: Member, timeout_s: float, replacement: Callable[[Any, ActorDied], Any]
    ) -> None:
        self.handle, self.member, self.timeout_s, self.replacement = handle, member, timeout_s, replacement
        self.result_s = timeout_s  # the limit of a wait for results
        self.is_waiting = False  # for another actor
        self.name = uuid.uuid4().hex  # of this connection, for the actor
        self.pending: dict[int, asyncio.Future[Result]] = {}  # by the number of the order
        self.orders: dict[int, Order] = {}  # what the pending ones are
        self.outbox: Bundle[tuple[int, Order]] = Bundle(self.pass_on)
        self.numbers = count()
        self.tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references
        self.accepted = 0  # orders that the actor has

    async def send(self, order: Order) -> Result:
        """Send an order with all others of this turn of the event loop, and wait for its result."""
        number = next(self.numbers)
        self.pending[number] = asyncio.get_running_loop().create_future()
        self.orders[number] = order
        self.outbox.add((number, order))
        return await self.pending[number]

    def pass_on(self, bundle: list[tuple[int, Order]]) -> None:
        """Send orders. If another actor is being started, it gets all that are pending."""
        if not self.is_waiting:
            self.start(self.submit(bundle))

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a coroutine."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def submit(self, bundle: list[tuple[int, Order]]) -> None:
        """Send orders, and begin to receive if nobody does. Orders that the actor refuses fail."""
        handle = self.handle
        try:
            await self.call(handle.submit.remote(self.name, bundle), f"{len(bundle)} {self.doing}")
        except ActorDied as death:
            await self.recover(handle, death)
            return
        except Exception as error:
            self.fail([number for number, _ in bundle], error)
            return
        self.accepted += len(bundle)
        if self.accepted == len(bundle):
            self.start(self.receive())

    async def receive(self) -> None:
        """Receive results while the actor has orders."""
        handle = self.handle
        try:
            while self.accepted:
                activity = f"{self.accepted} {self.doing}"
                finished = handle.wait_for_finished.remote(self.name)
                done = await reply(finished, activity, self.result_s, self.member, self.result_flags)
                if handle is not self.handle or self.is_waiting:
                    return  # it is known to be dead: another actor does what it had
                for number, result in done:
                    self.take(number, result)
        except ActorDied as death:
            await self.recover(handle, death)
        except Exception as error:
            self.accepted = 0
            self.fail([*self.pending], error)

    def take(self, number: int, result: Any) -> None:
        """Give a result to who waits for it."""
        self.accepted -= 1
        if number in self.pending and not (waiter := self.pop_waiter(number)).cancelled():
            waiter.set_result(result)

    async def recover(self, handle: Any, death: ActorDied) -> None:
        """Send the unfinished orders to the actor that takes the place of `handle`, which died. Several calls may
        notice one death."""
        if handle is not self.handle or self.is_waiting:
            return
        self.is_waiting = True
        try:
            restart = in_background("restart", lambda: self.replacement(handle, death))
            self.handle = await asyncio.wrap_future(restart)
        except Exception as error:
            self.fail([*self.pending], error)
            return
        finally:
            self.is_waiting, self.accepted, self.outbox.items = False, 0, []
        for number in [number for number, waiter in self.pending.items() if waiter.cancelled()]:
            self.pop_waiter(number)
        if self.orders:
            show_line(f"{self.member.name} runs again: its {len(self.orders)} unfinished {self.again}")
            self.start(self.submit([*self.orders.items()]))

    async def call(self, ref: ray.ObjectRef, activity: str) -> Any:
        return await reply(ref, activity, self.timeout_s, self.member)

    def fail(self, numbers: Sequence[int], error: Exception) -> None:
        """Raise `error` in everyone who waits for one of these orders."""
        for number in numbers:
            if number in self.pending and not (waiter := self.pop_waiter(number)).cancelled():
                waiter.set_exception(error)

    def pop_waiter(self, number: int) -> asyncio.Future[Result]:
        """Return who waits for an order, which is over."""
        del self.orders[number]
        return self.pending.pop(number)


class Restarts:
    """How often each of `actors` actors was started again: at most `limit` times, which the flag `flag` says."""

    def __init__(self, actors: int, limit: int, flag: str) -> None:
        self.counts, self.limit, self.flag = [0] * actors, limit, flag

    @property
    def total(self) -> int:
        """Return how often actors were started again."""
        return sum(self.counts)

    def count(self, number: int, death: ActorDied) -> None:
        """Count a restart of the actor `number`, and tell the user. Raise its death if there may be no other."""
        count = self.counts[number]
        if not self.limit or has_lost_its_node(death.actor_id):  # devices that are gone are not to be waited for
            raise death
        if count == self.limit:
            said = f"{death}\nIt had been started again {count} times ({self.flag}={self.limit})"
            raise ActorDied(said, death.name, death.actor_id)
        self.counts[number] += 1
        first, *_ = str(death).splitlines()
        show_line(f"{first} It is started again (restart {count + 1} of {self.limit}, {self.flag})", to_stderr=True)
