"""The thread that owns a vLLM engine: it runs steps while requests are unfinished, and commands between the steps.

Everything that touches the engine happens on this one thread, since an engine is not thread-safe and the current CUDA
device belongs to a thread. Callers get futures.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from rlhf_suite.errors import RunError, UserError

T = TypeVar("T")


@dataclass
class Job(Generic[T]):
    """One request to the engine: the prompt, vLLM's sampling parameters, and the function that reads its output."""

    prompt_ids: Sequence[int]
    params: Any  # vllm.SamplingParams
    read: Callable[[Any], T]  # vllm.RequestOutput -> result


@dataclass
class Batch(Generic[T]):
    """Jobs whose results are returned together, in order."""

    jobs: Sequence[Job[T]]
    future: Future[list[T]] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.results: list[T | None] = [None] * len(self.jobs)
        self.left = len(self.jobs)

    def put(self, index: int, result: T) -> None:
        """Store one result; the last one completes the future."""
        self.results[index] = result
        self.left -= 1
        if self.left == 0:
            self.future.set_result(self.results)  # type: ignore[arg-type]


class StepLoop:
    """Runs the engine that `build` makes. Building takes seconds, and calls made meanwhile wait.

    The first failure of the build, of a step or of a weight update is final: every later call raises it.
    """

    def __init__(self, build: Callable[[], Any], add: Callable[[Any, str, Job[Any]], None]) -> None:
        self._build, self._add = build, add
        self._commands: SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = SimpleQueue()
        self._waiting: dict[str, tuple[Batch[Any], int]] = {}
        self._numbers = count()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._main, name="vllm-step-loop", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Any], T]) -> Future[T]:
        """Run `function(engine)` between two steps."""
        future: Future[T] = Future()
        self._commands.put((function, future))
        return future

    def run(self, jobs: Sequence[Job[T]]) -> Future[list[T]]:
        """Return the results of all jobs, in order, when the last one is finished."""
        batch = Batch(jobs)
        if not jobs:
            batch.future.set_result([])
            return batch.future
        self.call(lambda engine: self._submit(engine, batch)).add_done_callback(lambda added: _fail(batch, added))
        return batch.future

    def progress(self) -> tuple[int, int]:
        """Return (finished, total) of the requests of unfinished batches."""
        batches = {id(batch): batch for batch, _ in list(self._waiting.values())}.values()
        total = sum(len(batch.jobs) for batch in batches)
        return total - sum(batch.left for batch in batches), total

    def fail(self, error: BaseException, what: str) -> Exception:
        """Make the engine unusable, e.g. because it has only some of the new weights. Return what every later call
        raises.

        This must run on the loop's thread.
        """
        if isinstance(error, UserError | RunError):
            self._failure = error
        else:  # an exception of another library may not pickle
            self._failure = RunError(f"the engine failed while {what}: {type(error).__name__}: {error}")
            traceback.print_exception(error)  # to the actor's log
        for batch, _ in self._waiting.values():
            if not batch.future.done():
                batch.future.set_exception(self._failure)
        self._waiting.clear()
        return self._failure

    def close(self) -> None:
        """Stop the thread and the engine."""
        self._commands.put(None)
        self._thread.join()

    def _submit(self, engine: Any, batch: Batch[Any]) -> None:
        """Add the jobs of a batch to the engine, all of them or none."""
        names = [str(next(self._numbers)) for _ in batch.jobs]
        try:
            for index, (name, job) in enumerate(zip(names, batch.jobs, strict=True)):
                self._add(engine, name, job)
                self._waiting[name] = (batch, index)
        except BaseException:
            added = [name for name in names if self._waiting.pop(name, None)]
            engine.abort_request(added)
            raise

    def _main(self) -> None:
        """Build the engine, then alternate between commands and steps until `close`."""
        engine = None
        try:
            engine = self._build()
        except BaseException as error:
            self.fail(error, "starting")
        while self._run_commands(engine):
            if self._waiting:
                self._step(engine)
        if engine is not None:
            engine.engine_core.shutdown()

    def _run_commands(self, engine: Any) -> bool:
        """Run the waiting commands; wait for one if there is nothing to step. Return False if the loop is to stop."""
        while not (self._waiting and self._commands.empty()):
            command = self._commands.get()
            if command is None:
                return False
            function, future = command
            try:
                if self._failure:
                    raise self._failure
                future.set_result(function(engine))
            except BaseException as error:
                future.set_exception(error)
        return True

    def _step(self, engine: Any) -> None:
        """Run one step of the engine and store the results of finished requests."""
        try:
            for output in engine.step():
                batch, index = self._waiting.pop(output.request_id)
                batch.put(index, batch.jobs[index].read(output))
        except BaseException as error:
            self.fail(error, "generating")


def _fail(batch: Batch[Any], added: Future[None]) -> None:
    """Make a batch fail as a whole if it could not be added."""
    if (error := added.exception()) is not None and not batch.future.done():
        batch.future.set_exception(error)
