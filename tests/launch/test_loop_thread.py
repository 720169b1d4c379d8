"""The watch over coroutines that block the event loop of all others."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rlhf_suite.errors import RunError, UserError
from rlhf_suite.launch.loop_thread import LOOK_S, LoopThread

FLAG = "agent.tool_timeout_s"


async def blocks(released: threading.Event) -> str:
    released.wait()
    return "late"


async def waits(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "in time"


@pytest.fixture
def released():
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.notices(
    "a coroutine that blocks the event loop is not noticed",
    "launch/loop_thread.py",
    'self.fail(UserError(f"{place}',
    '(UserError(f"{place}',
)
def test_a_coroutine_that_blocks_the_loop_fails_all_others(released, capsys):
    loop = LoopThread("test")
    loop.watch(4 * LOOK_S, FLAG)
    others = [loop.start(waits(60)), loop.start(blocks(released)), loop.start(waits(0))]
    for each in others:
        with pytest.raises(UserError) as error:
            each.result(60)
        line = blocks.__code__.co_firstlineno + 1
        assert f"test_loop_thread.py:{line} (blocks) has blocked all episodes for {FLAG}=2 s" in str(error.value)
    with pytest.raises(UserError, match="has blocked"):
        loop.start(waits(0)).result(60)
    assert capsys.readouterr().err.count("blocks all episodes of its process") == 1
    released.set()
    later = asyncio.run_coroutine_threadsafe(waits(0), loop.loop)
    assert later.result(60) == "in time", "what was started before the failure comes to its end without harm"


@pytest.mark.notices(
    "many short calls on an event loop count as one that blocks it",
    "launch/loop_thread.py",
    "now is not None and now == before",
    "now is not None and before is not None",
)
def test_many_short_calls_in_a_row_and_long_waits_are_no_block(capsys):
    """Each of the calls blocks the loop, and together they do so for longer than the limit."""
    loop = LoopThread("test")
    loop.watch(8 * LOOK_S, FLAG)

    async def short() -> None:
        time.sleep(LOOK_S)

    calls = [loop.start(short()) for _ in range(12)]
    assert loop.start(waits(10 * LOOK_S)).result(300) == "in time"
    assert [each.result(300) for each in calls] == [None] * 12
    assert not capsys.readouterr().err


def test_results_and_errors_come_back():
    loop = LoopThread("test")

    async def fails() -> None:
        raise KeyError("x")

    assert loop.start(waits(0)).result(60) == "in time"
    with pytest.raises(KeyError):
        loop.start(fails()).result(60)
    assert not loop.open


@pytest.mark.notices(
    "the requests of a run that has ended are left pending",
    "launch/loop_thread.py",
    "            for task in tasks:\n                task.cancel()\n",
    "            tasks = set()\n",
)
def test_the_end_of_a_loop_fails_all_that_was_started_and_runs_what_they_clean_up():
    loop, cleaned = LoopThread("test"), []

    async def tidy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("a sandbox")

    waiters = [loop.start(tidy()), loop.start(waits(600))]
    assert loop.start(waits(0)).result(60) == "in time"
    loop.end(ValueError("the run has ended"))
    for each in (*waiters, loop.start(waits(0))):
        with pytest.raises(ValueError, match="the run has ended"):
            each.result(60)
    assert cleaned == ["a sandbox"] and not loop.thread.is_alive()


@pytest.mark.notices(
    "the last failure is raised instead of the first",
    "launch/loop_thread.py",
    "self.error = self.error or error",
    "self.error = error",
)
def test_the_first_failure_of_a_task_is_raised_in_everyone_who_waits_and_later():
    loop, first = LoopThread("test"), ValueError("first")
    go_on = asyncio.Event()

    async def fails(error: Exception) -> None:
        await go_on.wait()
        raise error

    waiters = [loop.start(waits(600)), loop.task(fails(first)), loop.task(fails(ValueError("second")))]
    loop.loop.call_soon_threadsafe(go_on.set)
    for each in (*waiters, loop.start(waits(0))):
        assert each.exception(60) is first
    loop.end(ValueError("the run has ended"))
    assert loop.start(waits(0)).exception(60) is first


def test_work_that_blocks_is_done_in_a_thread_of_the_loop_which_the_end_waits_for():
    loop, begun, go_on, names = LoopThread("test"), threading.Event(), threading.Event(), list[str]()

    def work() -> str:
        begun.set()
        assert go_on.wait(60)
        names.append(threading.current_thread().name)
        return "done"

    outcome = loop.task(loop.run_blocking("rewards", work))
    assert begun.wait(60) and loop.start(waits(0)).result(60) == "in time", "the loop goes on"
    go_on.set()
    loop.join_threads(60)
    assert names == ["rewards"] and outcome.result(60) == "done" and not loop.blocked
    loop.end(ValueError("the run has ended"))


def test_a_thread_that_exits_fails_its_task_and_not_the_loop():
    loop = LoopThread("test")

    def work() -> None:
        raise SystemExit(3)

    with pytest.raises(RunError, match=r"the thread rollouts was ended by SystemExit\(3\)"):
        loop.start(loop.run_blocking("rollouts", work)).result(60)
    assert loop.start(waits(0)).result(60) == "in time"
    loop.end(ValueError("the run has ended"))
