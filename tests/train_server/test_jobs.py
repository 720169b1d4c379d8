"""The order in which requests are done, and how long their answers are kept."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from rlhf_suite.errors import RunError, UserError
from rlhf_suite.serving.http_server import BadRequest
from rlhf_suite.train_server.jobs import MAX_FETCHED, Job, Jobs
from rlhf_suite.train_server.service import SILENT_S, Sessions
from rlhf_suite.train_server.steps import Clock

pytestmark = pytest.mark.quick


class Device:
    """Models without ranks and engines: it writes down what it is asked for."""

    def __init__(self) -> None:
        self.sampled, self.unfinished, self.done = "base", "", []

    def bring_to_engines(self, address: str) -> None:
        if address == "lost":
            raise UserError("these weights are no longer kept")
        self.done.append(f"bring {address}")
        self.sampled = address


def play(scene, **more):
    """Run a scene with the jobs of a device; return what the device did, and the errors that end the server."""

    async def run():
        device, failures = Device(), []
        jobs = Jobs(device, failures.append, Clock(), **more)
        task = asyncio.create_task(jobs.run())
        await asyncio.wait_for(scene(jobs, device), 60)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return device.done, failures

    return asyncio.run(run())


def job(device, number, model="", weights="", then=lambda: None, **more):
    async def work():
        device.done.append(number)
        then()
        return {"number": number}

    return Job(number, work, model, weights, **more)


def test_requests_of_a_model_are_done_by_their_numbers_and_sent_twice_once():
    async def scene(jobs, device):
        for seq in (3, 1, 1, 2, 3):
            jobs.add_in_order(job(device, f"a{seq}", "a"), seq)
        assert await jobs.fetch("a3", 30) == {"number": "a3"} == await jobs.fetch("a3", 30)

    assert play(scene) == (["a1", "a2", "a3"], [])


def test_a_model_whose_gradients_wait_comes_first():
    async def scene(jobs, device):
        for name, seq in (("a", 1), ("b", 1), ("b", 2), ("a", 2)):
            waits = "a" if (name, seq) == ("a", 1) else "" if name == "a" else device.unfinished
            jobs.add_in_order(
                job(device, f"{name}{seq}", name, then=lambda waits=waits: setattr(device, "unfinished", waits)), seq
            )
        await jobs.fetch("b2", 30)

    assert play(scene)[0] == ["a1", "a2", "b1", "b2"]


def test_new_weights_wait_for_the_samples_of_older_ones():
    async def scene(jobs, device):
        gate = asyncio.Event()

        async def slow():
            await asyncio.wait_for(gate.wait(), 30)
            device.done.append("slow")
            return {}

        jobs.add(Job("slow", slow, weights="base"))
        jobs.add(job(device, "beside", weights="base"))
        jobs.add(job(device, "other", weights="new"))
        jobs.add_in_order(job(device, "sync", "a", changes_engines=True), 1)
        assert await jobs.fetch("beside", 30) == {"number": "beside"}
        assert await jobs.fetch("other", 0.05) is None
        gate.set()
        await jobs.fetch("sync", 30)

    assert play(scene)[0] == ["beside", "slow", "bring new", "other", "sync"]


def test_an_error_is_the_answer_to_its_request_alone():
    def fail(error):
        raise error

    async def scene(jobs, device):
        jobs.add(job(device, "user", then=lambda: fail(UserError("a mistake"))))
        jobs.add(job(device, "ours", then=lambda: fail(ValueError("a bug"))))
        jobs.add(job(device, "lost", weights="lost"))
        jobs.add(job(device, "dead", then=lambda: fail(RunError("a rank died"))))
        jobs.add(job(device, "after"))
        assert await jobs.fetch("user", 30) == {"error": "a mistake", "category": "user"}
        assert await jobs.fetch("ours", 30) == {"error": "ValueError: a bug", "category": "server"}
        assert (await jobs.fetch("lost", 30))["error"] == "these weights are no longer kept"
        assert (await jobs.fetch("dead", 30))["category"] == "server"
        assert await jobs.fetch("after", 30) == {"number": "after"}

    assert [str(error) for error in play(scene)[1]] == ["a rank died"]


def test_answers_are_kept_until_many_others_have_been_fetched():
    async def scene(jobs, device):
        for number in range(MAX_FETCHED + 1):
            jobs.add(job(device, str(number)))
        jobs.add(job(device, "unfetched"))
        await jobs.fetch("0", 30)
        for number in range(1, MAX_FETCHED + 1):
            assert await jobs.fetch("0", 30)
            await jobs.fetch(str(number), 30)
        with pytest.raises(KeyError):
            await jobs.fetch("0", 30)
        assert await jobs.fetch("1", 30) and await jobs.fetch("unfetched", 30)

    play(scene)


@pytest.mark.notices(
    "a request that is sent again after its answer is gone is done again",
    "train_server/jobs.py",
    "if seq < line.next:",
    "if False:",
)
def test_a_request_whose_answer_is_gone_is_not_done_again():
    async def scene(jobs, device):
        jobs.add_in_order(job(device, "a1", "a"), 1)
        await jobs.fetch("a1", 30)
        for number in range(MAX_FETCHED):
            jobs.add(job(device, str(number)))
            await jobs.fetch(str(number), 30)
        with pytest.raises(BadRequest, match=r"seq_id=1: this request of a is over.* the next number is 2"):
            jobs.add_in_order(job(device, "a1", "a"), 1)
        jobs.add_in_order(job(device, "a2", "a"), 2)
        await jobs.fetch("a2", 30)

    done, _ = play(scene)
    assert [number for number in done if number[0] == "a"] == ["a1", "a2"]


def test_requests_behind_one_that_does_not_arrive_fail_together_and_the_next_one_is_done():
    async def scene(jobs, device):
        for seq in (1, 3, 4):
            jobs.add_in_order(job(device, f"a{seq}", "a"), seq)
        for seq in (3, 4):
            reason = f"request {seq} was not done: request 2 has not arrived before it"
            assert await jobs.fetch(f"a{seq}", 30) == {"error": reason, "category": "user"}
        with pytest.raises(BadRequest, match="seq_id=2: this request of a is over"):
            jobs.add_in_order(job(device, "a2", "a"), 2)
        jobs.add_in_order(job(device, "a5", "a"), 5)
        await jobs.fetch("a5", 30)

    assert play(scene, gap_s=0.01)[0] == ["a1", "a5"]


@pytest.mark.notices(
    "a client that trains, but whose heartbeat has stopped, loses its models",
    "train_server/service.py",
    """        if session in self.heard:
            self.heard[session] = self.now()
""",
    "",
)
def test_any_request_of_a_client_says_that_it_is_there():
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    session = sessions.begin()
    now[0] = SILENT_S - 1
    assert sessions.hear_of(f"{session}:train:0:17") and not sessions.hear_of("other:train:0")
    now[0] = 2 * SILENT_S - 2
    assert not sessions.is_left(f"{session}:train:0") and sessions.is_left("other:train:0")
    now[0] += 1
    assert sessions.is_left(f"{session}:train:0")
