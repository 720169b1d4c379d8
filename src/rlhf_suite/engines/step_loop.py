"""The thread that owns a vLLM engine: it runs steps while requests are unfinished, and commands between the steps.

Everything that touches the engine happens on this one thread, since an engine is not thread-safe and the current CUDA
device belongs to a thread. Callers get futures.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from rlhf_suite.background import begin_future
from rlhf_suite.data.images import Image
from rlhf_suite.errors import RunError, UserError

T = TypeVar("T")


@dataclass
class Job(Generic[T]):
    """One request to the engine: the prompt, vLLM's sampling parameters, and the function that reads its output."""

    prompt_ids: Sequence[int]
    params: Any  # vllm.SamplingParams
    read: Callable[[Any], T]  # vllm.RequestOutput -> result
    is_divisible: bool = False  # whether it may end early with what it has
    images: Sequence[Image] = ()  # those whose tokens are in `prompt_ids`
    result: Future[T] = field(default_factory=begin_future)


class Ended:
    """Receives from vLLM the outputs of requests that are aborted."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def put(self, output: Any) -> None:
        self.outputs.append(output)


class StepLoop:
    """Runs the engine that `build` makes. Building takes seconds, and calls made meanwhile wait.

    The first failure of the build, of a step, of an interruption or of a weight update is final: every later call
    raises it. If it is that of a step, `failed(engine, error)` is called first.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        add: Callable[[Any, str, Job[Any]], None],
        failed: Callable[[Any, BaseException], None] = lambda engine, error: None,
    ) -> None:
        self._build, self._add, self._failed = build, add, failed
        self._commands: SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = SimpleQueue()
        self._waiting: dict[str, Job[Any]] = {}
        self._numbers = count()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._main, name="vllm-step-loop", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Any], T]) -> Future[T]:
        """Run `function(engine)` between two steps."""
        future: Future[T] = begin_future()
        self._commands.put((function, future))
        return future

    def run(self, jobs: Sequence[Job[Any]]) -> None:
        """Add jobs to the engine, all of them or none; each one's `result` is set when it is finished."""
        if jobs:
            self.call(lambda engine: self._submit(engine, jobs)).add_done_callback(lambda added: _fail(jobs, added))

    def interrupt(self, engine: Any) -> None:
        """End the divisible jobs now: the result of each is what it has so far. This must run on the loop's thread."""
        names = [name for name, job in self._waiting.items() if job.is_divisible]
        ended = Ended()
        processor = engine.output_processor
        for name in names:
            for state in processor.external_req_ids[name]:
                processor.request_states[state].queue = ended  # an engine without queues drops the output of an abort
        engine.abort_request(names)
        try:
            self._finish(ended.outputs)
        except BaseException as error:
            raise self.fail(error, "interrupting requests") from None

    @property
    def unfinished(self) -> int:
        """The number of jobs that the engine has."""
        return len(self._waiting)

    def fail(self, error: BaseException, activity: str) -> Exception:
        """Make the engine unusable, e.g. because it has only some of the new weights. Return what every later call
        raises.

        This must run on the loop's thread.
        """
        if isinstance(error, UserError | RunError):
            self._failure = error
        else:  # an exception of another library may not pickle
            self._failure = RunError(f"the engine failed while {activity}: {type(error).__name__}: {error}")
            traceback.print_exception(error)  # to the actor's log
        for job in self._waiting.values():
            job.result.set_exception(self._failure)
        self._waiting.clear()
        return self._failure

    def close(self) -> None:
        """Stop the thread and the engine."""
        self._commands.put(None)
        self._thread.join()  # no-limit: the driver's call has one

    def _submit(self, engine: Any, jobs: Sequence[Job[Any]]) -> None:
        """Add jobs to the engine, all of them or none."""
        names = [str(next(self._numbers)) for _ in jobs]
        try:
            for name, job in zip(names, jobs, strict=True):
                self._add(engine, name, job)
                self._waiting[name] = job
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
            command = self._commands.get()  # no-limit: it has nothing to do
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
            self._finish(engine.step())
        except BaseException as error:
            self._failed(engine, error)
            self.fail(error, "generating")

    def _finish(self, outputs: Iterable[Any]) -> None:
        """Store the results of finished requests."""
        for output in outputs:
            job = self._waiting[output.request_id]
            response = job.read(output)
            del self._waiting[output.request_id]  # only now: a failure of `read` is one of this job too
            job.result.set_result(response)


def _fail(jobs: Sequence[Job[Any]], added: Future[None]) -> None:
    """Make jobs fail together if they could not be added."""
    if (error := added.exception()) is not None:
        for job in jobs:
            job.result.set_exception(error)
