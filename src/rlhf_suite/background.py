"""Work in threads of its own, which never keep the process alive when a run ends.

The pools of `concurrent.futures` do: the interpreter joins their threads at its end, so a reward that hangs would hold
a run that was stopped. The pools of the suite end with their block, or with the server of a reward model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from rlhf_suite.waits import LOOK_S, Patience, result, waiting

T = TypeVar("T")


def begin_future() -> Future[T]:
    """Return a future that nobody can cancel: a thread that sets the result of a cancelled one would end by an error,
    and with it all that it is asked for later."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    return outcome


def in_background(name: str, work: Callable[[], T]) -> Future[T]:
    """Start `work` in a thread `name`; the future has what it returns or raises."""
    outcome: Future[T] = begin_future()
    threading.Thread(target=settle, args=(outcome, work), name=name, daemon=True).start()
    return outcome


def settle(outcome: Future[T], work: Callable[[], T]) -> None:
    """Do some work; the future gets what it returns or raises, whatever it is: nobody must wait for ever."""
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)


def together(name: str, work: Sequence[Callable[[], T]]) -> list[T]:
    """Do several things at the same time, and return what they return, in their order. The first error that happens is
    raised at once."""
    if len(work) == 1:
        return [work[0]()]
    futures = [in_background(name, task) for task in work]
    ended = Ended[T](name)
    for future in futures:
        ended.add(future)
    for _ in ended.results(len(futures)):
        pass
    return [result(future, name) for future in futures]


class Ended(Generic[T]):
    """Futures in the order in which they end. What fails is raised at once."""

    def __init__(self, activity: str) -> None:
        """`activity` is waited for, in words."""
        self.what = activity
        self.queue: SimpleQueue[Future[T]] = SimpleQueue()

    def add(self, future: Future[T]) -> None:
        """Yield the result of this future when it has ended."""
        future.add_done_callback(self.queue.put)

    def results(self, count: int) -> Iterator[T]:
        """Yield the results of the next `count` futures."""
        for _ in range(count):
            yield self.next().result(0)

    def next(self) -> Future[T]:
        """Return the next future that has ended."""
        patience = Patience(self.what)
        with waiting(self.what):
            while True:
                try:
                    return self.queue.get(timeout=LOOK_S)
                except Empty:
                    patience.look()


class Line(Generic[T]):
    """A thread that does pieces of work one after the other, until it is closed."""

    def __init__(self, name: str) -> None:
        self.queue: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        self.is_closed = False
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Append a piece of work; the future has what it returns or raises."""
        outcome: Future[T] = Future()
        self.queue.put((outcome, work))
        return outcome

    def close(self) -> None:
        """Begin nothing more. What is under way is not waited for."""
        self.is_closed = True
        self.queue.put(None)

    def _work(self) -> None:
        while (piece := self.queue.get()) is not None:  # no-limit: a thread that has nothing to do
            outcome, work = piece
            if self.is_closed:
                outcome.cancel()
            elif outcome.set_running_or_notify_cancel():  # it was not cancelled while it waited
                settle(outcome, work)
