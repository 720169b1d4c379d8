"""The thread that owns a vLLM engine: it runs commands between steps, and steps while requests are unfinished.

Everything that touches the engine happens on this one thread (an engine is not thread-safe, and the current CUDA device
belongs to a thread); callers get futures.
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
    """One request for the engine: the prompt, vLLM's sampling parameters, and how to read its output."""

    prompt_ids: Sequence[int]
    params: Any  # vllm.SamplingParams
    read: Callable[[Any], T]  # vllm.RequestOutput -> result


@dataclass
class Batch(Generic[T]):
    """Jobs whose results are wanted together, in order."""

    jobs: Sequence[Job[T]]
    future: Future[list[T]] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.results: list[T | None] = [None] * len(self.jobs)
        self.left = len(self.jobs)

    def put(self, index: int, result: T) -> None:
        """Record one result; the last one resolves the future."""
        self.results[index] = result
        self.left -= 1
        if self.left == 0:
            self.future.set_result(self.results)  # type: ignore[arg-type]


class StepLoop:
    """Runs the engine that `build` makes, which takes seconds: calls made meanwhile wait.

    The first failure of the build, of a step or of a weight update is final; every later call reports it.
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
        """Results of all jobs, in order, when the last one is done."""
        batch = Batch(jobs)
        if not jobs:
            batch.future.set_result([])
            return batch.future
        self.call(lambda engine: self._submit(engine, batch)).add_done_callback(lambda added: _fail(batch, added))
        return batch.future

    def progress(self) -> tuple[int, int]:
        """(done, all) requests of the batches under way."""
        batches = {id(batch): batch for batch, _ in list(self._waiting.values())}.values()
        total = sum(len(batch.jobs) for batch in batches)
        return total - sum(batch.left for batch in batches), total

    def fail(self, error: BaseException, what: str) -> Exception:
        """Nothing may use the engine any more (called on the loop's thread): it holds half a set of weights, say.

        Returns what every call raises from now on.
        """
        if isinstance(error, UserError | RunError):
            self._failure = error
        else:  # a foreign exception may not pickle
            self._failure = RunError(f"the engine failed while {what}: {type(error).__name__}: {error}")
            traceback.print_exception(error)  # into the actor's log
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
        """Run what has been asked for; waits for it when there is nothing to step. False: stop."""
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
        try:
            for output in engine.step():
                batch, index = self._waiting.pop(output.request_id)
                batch.put(index, batch.jobs[index].read(output))
        except BaseException as error:
            self.fail(error, "generating")


def _fail(batch: Batch[Any], added: Future[None]) -> None:
    """A batch that could not be added fails as a whole."""
    if (error := added.exception()) is not None and not batch.future.done():
        batch.future.set_exception(error)
