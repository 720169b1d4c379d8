"""The thread of an engine goes on whatever becomes of those who ask it. vLLM is a stub that writes at each step."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from rlhf_suite.background import Line
from rlhf_suite.engines.step_loop import Job, StepLoop
from rlhf_suite.errors import RunError


class Stub:
    """What the loop calls of vLLM's engine. A request is finished by a step if its parameters say so."""

    def __init__(self):
        self.requests, self.engine_core = {}, SimpleNamespace(shutdown=lambda: None)
        self.output_processor = self
        self.request_states, self.external_req_ids = {}, {}

    def add(self, name, job):
        self.requests[name], self.external_req_ids[name] = job.params, [name]
        self.request_states[name] = SimpleNamespace(queue=None)

    def step(self):
        done = [name for name, is_short in self.requests.items() if is_short]
        return [SimpleNamespace(request_id=name) for name in done if self.requests.pop(name)]

    def abort_request(self, names):
        for name in names:
            self.request_states[name].queue.put(SimpleNamespace(request_id=name))


def start():
    return StepLoop(Stub, lambda engine, name, job: engine.add(name, job))


@pytest.mark.notices(
    "an engine stands still after a call that its caller has cancelled",
    "background.py",
    "    outcome.set_running_or_notify_cancel()\n    return",
    "    return",
)
def test_who_cancels_a_call_or_a_request_does_not_end_the_loop():
    loop, may_go_on = start(), threading.Event()
    loop.call(lambda engine: may_go_on.wait(300))
    job = Job([1], True, lambda output: "response")
    loop.run([job])
    for future in (loop.call(lambda engine: 1), job.result):
        future.cancel()
    may_go_on.set()
    assert loop.call(lambda engine: 2).result(300) == 2
    assert job.result.result(300) == "response"
    loop.close()


def test_a_line_of_work_passes_over_what_was_cancelled():
    line, may_go_on, done = Line("line"), threading.Event(), list[int]()
    line.start(lambda: may_go_on.wait(300))
    cancelled = line.start(lambda: done.append(1))
    assert cancelled.cancel()
    may_go_on.set()
    line.start(lambda: done.append(2)).result(300)
    assert done == [2]
    line.close()


@pytest.mark.notices(
    "who waits for a request that is interrupted in vain waits on",
    "engines/step_loop.py",
    'raise self.fail(error, "interrupting requests") from None',
    "raise",
)
def test_a_response_that_cannot_be_read_at_an_interruption_fails_all_requests():
    def read(output):
        raise ValueError("no such token")

    loop = start()
    jobs = [Job([1], False, read, is_divisible=True), Job([1], False, lambda output: "late")]
    loop.run(jobs)
    with pytest.raises(RunError, match="failed while interrupting requests: ValueError: no such token"):
        loop.call(loop.interrupt).result(300)
    for job in jobs:
        assert "no such token" in str(job.result.exception(30))
    with pytest.raises(RunError, match="no such token"):
        loop.call(lambda engine: None).result(300)
    loop.close()
