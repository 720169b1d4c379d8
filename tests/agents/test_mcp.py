"""Servers of MCP: a session for each episode, and what a server that is not there or dies becomes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from counting_server import server as counting
from mcp_server import server
from scripted import Scripted, chat_task, open_session, run

from rlhf_suite.agents.build import make_agent
from rlhf_suite.agents.calls import EnvironmentFailure
from rlhf_suite.agents.mcp_tools import McpServer
from rlhf_suite.agents.tools import ToolError
from rlhf_suite.config.declarations.agent import AgentConfig, agents_of
from rlhf_suite.rewards.base import RewardFailure

pytestmark = pytest.mark.stack

HERE = Path(__file__).parent
STDIO, COUNTING = (f"{sys.executable} {HERE / name}.py" for name in ("mcp_server", "counting_server"))


async def ask(tools: McpServer):
    session = tools.of_episode()
    schemas = await session.schemas()
    await session.begin()
    answers = await asyncio.gather(*(session.call("add", {"a": n, "b": 1}) for n in range(5)))
    with pytest.raises(ToolError, match="fail"):
        await session.call("fail", {})
    await session.close()
    if tools.shared is not None and tools.shared.connection is not None:
        await tools.shared.end_connection(tools.shared.connection)
    return schemas, answers


def check_mcp(schemas, answers):
    assert [schema["function"]["name"] for schema in schemas] == ["add", "fail"]
    assert schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert answers == ["1", "2", "3", "4", "5"]


@contextmanager
def over_http(application):
    """Serve an MCP server at a free port, and yield its URL."""
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", 0))
        ours.listen()  # connections wait until the server answers
        http = uvicorn.Server(uvicorn.Config(application.streamable_http_app(), log_level="error"))
        thread = threading.Thread(target=http.run, args=([ours],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{ours.getsockname()[1]}/mcp"
        finally:
            http.should_exit = True
            thread.join()


@pytest.mark.notices("an error of an MCP tool is its answer", "agents/mcp_tools.py", "if result.is_error:", "if False:")
@pytest.mark.notices(
    "the URL of an MCP server is run as a command",
    "agents/mcp_tools.py",
    'server.startswith(("http://", "https://"))',
    'server.startswith("https://")',
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_tools_of_servers_over_standard_input_over_http_and_in_this_process(is_shared):
    check_mcp(*run(ask, McpServer(STDIO, is_shared)))
    check_mcp(*run(ask, McpServer(server, is_shared)))
    with over_http(server) as url:
        check_mcp(*run(ask, McpServer(url, is_shared)))


def called(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def totals(tokenizer, address: str, episodes: int = 3, **flags):
    """Play episodes at once, each of which adds 1 three times to what its server keeps; return what each was told."""
    config = AgentConfig(kind="tools", tools=[f"mcp:{address}"], timeout_s=600.0, **flags)
    agent = make_agent(agents_of(config)[0], must_score=False)

    async def play():
        replies = [*[called("count", by=1)] * 3, "done"]
        sessions = [
            open_session(tokenizer, Scripted(tokenizer, replies), chat_task(tokenizer), parser="hermes")
            for _ in range(episodes)
        ]
        return await asyncio.gather(*(agent.run(chat_task(tokenizer), each) for each in sessions))

    said = [tokenizer.decode(episode.ledgers[0].ids) for episode in run(play)]
    return [[int(number) for number in re.findall(r"<\|im_start\|>tool\n(\d+)", each)] for each in said]


@pytest.mark.notices(
    "each call has an MCP connection of its own",
    "agents/mcp_tools.py",
    "if self.connection is None or self.connection.is_over:",
    "if True:",
)
@pytest.mark.notices(
    "all episodes of a process share a session with an MCP server",
    "agents/mcp_tools.py",
    "        return self.shared or McpSession(self.server, self.schemas)\n",
    "        self.shared = self.shared or McpSession(self.server, self.schemas)\n        return self.shared\n",
)
@pytest.mark.notices(
    "sessions with an MCP server over HTTP are none",
    "agents/mcp_tools.py",
    'self.mode = "auto" if is_shared else "legacy"',
    'self.mode = "auto"',
)
def test_what_a_server_keeps_of_an_episode_never_reaches_another(tokenizer):
    assert totals(tokenizer, COUNTING) == [[1, 2, 3]] * 3
    with over_http(counting) as url:
        assert totals(tokenizer, url) == [[1, 2, 3]] * 3


def test_a_session_of_the_process_serves_all_its_episodes(tokenizer):
    given = totals(tokenizer, COUNTING, mcp_sessions="process")
    assert sorted(number for each in given for number in each) == [*range(1, 10)]


def test_a_server_starts_with_the_first_call_of_an_episode(tokenizer, tmp_path):
    starts = tmp_path / "starts"
    text = (HERE / "counting_server.py").read_text()
    (tmp_path / "noted.py").write_text(f"open({str(starts)!r}, 'a').write('x')\n{text}")
    config = AgentConfig(kind="tools", tools=[f"mcp:{sys.executable} {tmp_path / 'noted.py'}"], timeout_s=600.0)
    agent = make_agent(agents_of(config)[0], must_score=False)

    async def play():
        for replies in (["done"], ["done"], [called("count", by=1), "done"]):
            session = open_session(tokenizer, Scripted(tokenizer, replies), chat_task(tokenizer), parser="hermes")
            await agent.run(chat_task(tokenizer), session)

    run(play)
    assert starts.read_text() == "xx", "one to ask for the tools, one for the episode that called one"


@pytest.mark.notices(
    "the last words of an MCP server that died are not reported",
    "agents/mcp_tools.py",
    "self.said = (self.said + text)[-TAIL:]",
    "self.said = self.said[-TAIL:]",
)
def test_what_a_server_wrote_before_it_died_is_the_reason_of_the_failure(tokenizer, tmp_path):
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    config = AgentConfig(kind="tools", tools=[f"mcp:{sys.executable} {tmp_path / 'broken.py'}"], timeout_s=600.0)
    session = open_session(tokenizer, Scripted(tokenizer, []), chat_task(tokenizer), parser="hermes")
    outcome = run(make_agent(agents_of(config)[0], must_score=False).run, chat_task(tokenizer), session).outcome
    assert isinstance(outcome, RewardFailure) and "TaskGroup" not in outcome.reason
    assert re.search("does not answer .*No module named 'a_module_that_is_not_there'", outcome.reason, re.DOTALL)


def test_a_server_that_does_not_start_is_a_failure():
    with pytest.raises(EnvironmentFailure, match="the MCP server /nonexistent does not answer"):
        run(McpServer("/nonexistent").schemas)


@pytest.mark.notices(
    "an MCP server that did not start is never tried again",
    "agents/mcp_tools.py",
    "if self.listing is None or (self.listing.done() and has_failed(self.listing)):",
    "if self.listing is None:",
)
def test_a_server_that_did_not_start_is_started_with_the_next_use(tmp_path):
    file = tmp_path / "server.py"
    tools = McpServer(f"{sys.executable} {file}")

    async def twice():
        with pytest.raises(EnvironmentFailure, match="does not answer"):
            await tools.schemas()
        file.write_text((HERE / "mcp_server.py").read_text())
        return await ask(tools)

    check_mcp(*run(twice))


@pytest.mark.notices(
    "an MCP server that died is never started again",
    "agents/mcp_tools.py",
    "                await self.end_connection(connection)\n",
    "",
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_server_that_died_of_a_call_is_started_again_with_the_next(is_shared):
    async def both():
        session = McpServer(COUNTING, is_shared).of_episode()
        await session.begin()
        assert await session.call("count", {"by": 5}) == "5"
        with pytest.raises(ToolError, match="has ended, and what it kept is lost"):
            await session.call("die", {})
        await session.begin()
        answer = await session.call("count", {"by": 1})
        await session.end_connection(session.connection)
        return answer

    assert run(both) == "1"
