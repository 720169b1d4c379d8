"""The tokenizer and the endpoint of the tests of agents."""

from __future__ import annotations

import asyncio
from threading import Thread

import pytest
from scripted import chat_task, ends_of_turns, make_tokenizer, open_session

from clock import HOURS_S
from rlhf_suite.agents.episodes import with_outcome
from rlhf_suite.agents.isolation import container_tool
from rlhf_suite.polling import poll_until


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer(special=["<tool>", "</tool>"])


@pytest.fixture(scope="module")
def server():
    from rlhf_suite.serving.chat_server import ChatServer  # a server of HTTP, which few tests need

    return ChatServer("127.0.0.1")


@pytest.fixture
def forget_container_tool():
    """Have a test, and those after it, look for a program for containers again."""
    container_tool.cache_clear()
    yield
    container_tool.cache_clear()


@pytest.fixture
def play(tokenizer, server):
    """Run an episode of a program; return it and its ledgers as they are trained on."""

    from rlhf_suite.agents.endpoint import EndpointAgent

    def played(program, model, *, max_turns=50, timeout_s=600.0, must_score=False, overrides=False, **limits):
        async def episode():
            agent = EndpointAgent(
                program, server, max_turns, timeout_s, 10**5, must_score=must_score, overrides=overrides
            )
            return await agent.run(task, open_session(tokenizer, model, task, parser="hermes", **limits))

        task = chat_task(tokenizer)
        found = asyncio.run(asyncio.wait_for(episode(), HOURS_S))
        ledgers = with_outcome(found)
        for ledger in ledgers:  # each turn has one record, in the ledger where it was sampled
            assert [record.end for record in ledger.turn_records] == ends_of_turns(ledger)
        return found, ledgers

    return played


@pytest.fixture
def end_time_when(clock):
    """Put the clock after the limit of an episode as soon as a condition is met, however busy the machine is."""

    def arm(is_met):
        def watch():
            if poll_until(is_met, HOURS_S, 0.01):
                clock.forward(601.0)

        Thread(target=watch, daemon=True).start()

    return arm
