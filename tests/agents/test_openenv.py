"""Environments at a server of the protocol of OpenEnv."""

from __future__ import annotations

import numpy as np
import pytest
from scripted import Scripted, chat_task, open_session, run
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve

from openenv_server import OpenEnvServer
from rlhf_suite.agents.base import Task, Turn
from rlhf_suite.agents.build import make_agent
from rlhf_suite.agents.calls import EnvironmentFailure
from rlhf_suite.agents.openenv import OpenEnvEnvironment
from rlhf_suite.config.declarations.agent import AgentConfig, agents_of
from rlhf_suite.polling import poll_until
from rlhf_suite.rewards.base import RewardFailure, Scored


@pytest.fixture
def server():
    with_server = OpenEnvServer()
    yield with_server
    with_server.close()


def play(tokenizer, url, replies, text=False, **flags):
    row = {"label": "5", "columns": {"level": 2}}
    task = Task([5, 6], "a question", **row) if text else chat_task(tokenizer, **row)
    session = open_session(tokenizer, Scripted(tokenizer, replies), task)
    config = AgentConfig(kind="environment", server_url=url, timeout_s=600.0, tool_timeout_s=300.0, **flags)
    episode = run(make_agent(agents_of(config)[0], must_score=True).run, task, session)
    said = tokenizer.decode(episode.ledgers[0].ids)
    return episode, said.replace("<|im_start|>", "[").replace("<|im_end|>\n", "]")


@pytest.mark.notices(
    "an environment server does not learn that an episode is over",
    "agents/openenv.py",
    '            await self.socket.send(json.dumps({"type": "close"}))\n',
    "",
)
def test_an_episode_is_a_session_of_messages(tokenizer, server):
    episode, said = play(tokenizer, server.url, ["3", "9", "5"])
    assert said == (
        "[user\nbegin Between 1 and 9, not {'level': 2}.][assistant\n3][user\ntoo low][assistant\n9]"
        "[user\ntoo high][assistant\n5<|im_end|>"
    )
    assert episode.outcome == Scored(1.0, 1.0, {}) and episode.ending == "finished"
    (seen,) = server.sessions
    assert poll_until(lambda: len(seen) == 5, 300.0)  # nobody waits for the last message to arrive
    assert [message["type"] for message in seen] == ["reset", "step", "step", "step", "close"]
    assert seen[0]["data"] == {"label": "5", "level": 2} and seen[1]["data"] == {"message": "3"}


def test_without_a_chat_template_observations_are_raw_text(tokenizer, server):
    episode, said = play(tokenizer, server.url, ["3", "5"], text=True)
    assert said == "a question Between 1 and 9, not {'level': 2}.3<|im_end|>too low5<|im_end|>"
    assert episode.outcome.reward == 1


@pytest.mark.notices(
    "an action that a server refuses is a failure of the episode",
    "agents/openenv.py",
    'if kind == "step" and content.get("code") == WRONG_ACTION:',
    "if False:",
)
@pytest.mark.notices(
    "the model does not see what is wrong with an action that a server refuses",
    "agents/openenv.py",
    'listed = data.get("errors") or []',
    "listed = list[dict[str, Any]]()",
)
def test_a_turn_may_be_the_whole_action_and_one_that_is_refused_is_answered(tokenizer, server):
    replies = ["no", "[1]", '{"a": ' + "[" * 1500, '{"message": NaN}', '{"text": "5"}', '{"message": "5"}']
    episode, said = play(tokenizer, server.url, replies, action_key=None)
    assert said.count("[user\nError: the action is not a JSON object") == 4
    assert "[user\nError: Invalid message; message: Field required]" in said and episode.outcome == Scored(1.0, 1.0, {})


def test_the_field_that_the_model_sees_may_be_named(tokenizer, server):
    _, said = play(tokenizer, server.url, ["3", "5"], observation_key="turns")
    assert "begin0]" in said and "[user\n1]" in said
    episode, _ = play(tokenizer, server.url, ["3"], observation_key="none")
    assert "agent.observation_key=none" in episode.outcome.reason


def test_an_error_of_the_server_is_the_outcome(tokenizer, server):
    episode, _ = play(tokenizer, server.url, ["break"])
    assert isinstance(episode.outcome, RewardFailure)
    assert episode.outcome.reason == f"{server.url}: EXECUTION_ERROR: broken"
    gone, _ = play(tokenizer, "ws://127.0.0.1:9/ws", ["5"])
    assert isinstance(gone.outcome, RewardFailure) and "refused" in gone.outcome.reason.lower()


@pytest.mark.notices(
    "what an environment server says before it closes a connection is lost",
    "agents/openenv.py",
    "with suppress(ConnectionClosed):",
    "with suppress(TimeoutError):",
)
def test_a_server_that_takes_no_more_sessions_is_quoted():
    full = OpenEnvServer(is_full=True)

    async def play_later() -> None:
        environment = OpenEnvEnvironment(full.url, "message", None)
        environment.socket = await connect(full.url, proxy=None)
        await environment.socket.wait_closed()
        await environment.ask("reset", {})

    with pytest.raises(EnvironmentFailure) as failure:
        run(play_later)
    full.close()
    assert str(failure.value) == f"{full.url}: CAPACITY_REACHED: full; let it take agent.max_concurrent sessions"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("5", " answered 5, not a message of OpenEnv"),
        ('{"type": "observation", "data": [1]}', "'data': [1]}, not a message of OpenEnv"),
        ('{"type": "error", "data": "broken"}', "'data': 'broken'}, not a message of OpenEnv"),
        ('{"type": "observation", "data": {"reward": "1"}}', ": the reward is '1', not a number"),
        ("[" * 5000, ": the answer is nested too deeply"),
        ("oh", ": the answer is not JSON"),
        (b"\xff", ": the answer is not JSON"),
        ('{"type": "error", "data": {"code": "X", "message": "m", "errors": [5, {"loc": 5}]}}', ": X: m; : None"),
    ],
    ids=range(8),
)
def test_an_answer_outside_of_the_protocol_names_the_server(answer, reason):
    async def answer_with_it(connection):
        async for _ in connection:
            await connection.send(answer)

    async def step() -> str:
        async with serve(answer_with_it, "127.0.0.1", 0) as server:
            environment = OpenEnvEnvironment(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}", "message", None)
            environment.socket = await connect(environment.url, proxy=None)
            with pytest.raises(EnvironmentFailure) as failure:
                await environment.step(Turn(np.array([1]), "x", "x"))
            await environment.close()
            return str(failure.value).removeprefix(environment.url)

    said = run(step)
    assert said.endswith(reason) and said.startswith((" answered", ": "))
