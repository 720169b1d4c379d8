"""The order in which requests are done, and how long their answers are kept."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from rlhf_suite.errors import RunError, UserError
from rlhf_suite.train_server.jobs import MAX_FETCHED, Job, Jobs
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


def play(scene):
    """Run a scene with the jobs of a device; return what the device did, and the errors that end the server."""

    async def run():
        device, failures = Device(), []
        jobs = Jobs(device, failures.append, Clock())
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
