"""Python at a server of the protocol of SandboxFusion."""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
import tracemalloc
from contextlib import contextmanager, suppress

import pytest
from scripted import Scripted, chat_task, open_session, run

from reward_server import RewardServer
from rlhf_suite.agents import sandbox_fusion
from rlhf_suite.agents.build import make_agent
from rlhf_suite.agents.sandbox_fusion import MAX_BODY_BYTES, TRIES, RemotePython, ServerError
from rlhf_suite.certificates import certificates
from rlhf_suite.config.declarations.agent import AgentConfig, agents_of
from rlhf_suite.rewards.http_body import open_client
from rlhf_suite.sandbox.session import CallResult


def ran(status: str, stdout: str = "", stderr: str = "", code: int = 0) -> dict:
    overall = "Success" if status == "Finished" and code == 0 else "Failed"
    result = {"status": status, "stdout": stdout, "stderr": stderr, "return_code": code, "execution_time": 0.1}
    return {"status": overall, "message": "", "compile_result": None, "run_result": result}


@pytest.fixture
def serve():
    """A server that is asked again at once when it is busy, since it says so."""
    servers = []

    def start(*replies):
        left = iter(replies)
        servers.append(RewardServer(lambda body: next(left), {"Retry-After": "0"}))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (ran("Finished", "4\n"), CallResult("4\n")),
        (ran("Finished", "4\n", "ValueError: no\n", 1), CallResult("4\n", problem="ValueError: no\n")),
        (ran("Finished", code=3), CallResult("", problem="exit code 3")),
        (ran("TimeLimitExceeded", "1"), CallResult("1", problem="it was killed after 7 s", timed_out=True)),
        (ran("Finished", "\x1b[2J"), CallResult("\\x1b[2J")),
    ],
)
def test_a_program_prints_fails_or_takes_too_long(serve, reply, result):
    server = serve((200, reply))
    assert run(RemotePython(server.url, 64).run_async, "print(4)", 7.0) == result
    body = {"code": "print(4)", "language": "python", "run_timeout": 7.0, "memory_limit_MB": 64}
    assert server.seen[0].items() >= body.items()


def test_a_server_that_is_busy_is_asked_again(serve):
    sick = {"status": "SandboxError", "message": "no sandbox", "run_result": None}
    server = serve((503, {}), (200, sick), (429, {}), (200, ran("Finished", "4")))
    assert run(RemotePython(server.url, 64).run_async, "print(4)", 7.0) == CallResult("4")


@pytest.mark.notices(
    "a busy server of Python is not asked when it says",
    "agents/sandbox_fusion.py",
    'response.headers.get("Retry-After")',
    "None",
)
@pytest.mark.parametrize(
    ("reply", "reason"),
    [((200, {"status": "SandboxError", "message": "no sandbox"}), "no sandbox"), ((503, {}), "HTTP 503")],
)
def test_a_server_that_stays_busy_says_when_it_is_asked_again_and_is_given_up(serve, reply, reason):
    server = serve(*[reply] * TRIES)
    with pytest.raises(ServerError, match=f"{reason}, 4 times in a row") as raised:
        run(RemotePython(server.url, 64).run_async, "print(4)", 7.0)
    assert len(server.seen) == TRIES and raised.value.__cause__.retry_after == "0"


DEEP = b"[" * 100_000


@pytest.mark.notices(
    "the answer of a sandbox server may have any size",
    "agents/sandbox_fusion.py",
    "read_body(response, MAX_BODY_BYTES + 1, whole=False)",
    "response.aread()",
)
@pytest.mark.notices(
    "a sandbox server's answer is taken for one of the protocol",
    "agents/sandbox_fusion.py",
    "if not isinstance(ran, dict):",
    "if False:",
)
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((200, [1]), "of type list; the protocol has an object"),
        ((200, b"7"), "of type int; the protocol has an object"),
        ((200, DEEP), "nested too deeply"),
        ((200, b"<html>"), "not JSON"),
        ((200, {"status": "Success", "run_result": "4"}), "run_result is of type str"),
        ((200, {"status": "Success", "run_result": {"stdout": ["4"]}}), "stdout is of type list"),
        ((200, b"not gzip", "gzip"), "cannot be decompressed"),
        ((404, {}), "HTTP 404"),
        ((401, {}), "HTTP 401"),
    ],
)
def test_an_answer_of_another_form_is_an_error_at_once(serve, reply, reason):
    server = serve(reply)
    with pytest.raises(ServerError, match=reason):
        run(RemotePython(server.url, 64).run_async, "print(4)", 7.0)
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    "reply",
    [
        (200, b'{"status": "Success", "run_result": {"stdout": "' + b"x" * MAX_BODY_BYTES + b'"}}'),
        (200, gzip.compress(bytes(256 << 20), 1), "gzip"),
    ],
    ids=["plain", "gzip bomb"],
)
def test_an_answer_that_is_too_large_is_not_held_in_memory(serve, reply):
    server = serve(reply)
    tracemalloc.start()
    try:
        result = run(RemotePython(server.url, 64).run_async, "print('x')", 7.0)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert result.problem is not None and result.problem.startswith("it printed too much")


@contextmanager
def slow_server():
    """A server that sends a byte every tenth of a second until the client has gone."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            one, _ = listening.accept()
            with one, suppress(OSError):
                one.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while not stop.wait(0.1):
                    one.sendall(b" ")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        stop.set()
        thread.join(10)


@pytest.mark.notices(
    "each piece of a sandbox server's answer has its own deadline",
    "agents/sandbox_fusion.py",
    "asyncio.timeout(client.timeout.read)",
    "asyncio.timeout(None)",
    limit_s=60,
)
def test_an_answer_has_a_deadline_as_a_whole(serve, monkeypatch):
    """Each byte comes in time."""
    monkeypatch.setattr(sandbox_fusion, "MARGIN_S", 0.5)
    monkeypatch.setattr(sandbox_fusion, "TRIES", 1)
    with slow_server() as url, pytest.raises(ServerError, match=r"no answer within 0\.6 s"):
        run(RemotePython(url, 64).run_async, "print('x')", 0.1)


def test_a_server_that_nobody_reaches_has_a_reason(serve):
    server = serve()
    server.close()

    async def ask():
        python = RemotePython(server.url, 64)
        async with open_client(7.0) as client:
            await python.try_once(client, {})

    with pytest.raises(ServerError, match="connect") as raised:
        run(ask)
    assert raised.value.retry_after is None


def test_an_episode_runs_its_code_at_the_server(tokenizer, serve):
    server = serve((200, ran("Finished", "42\n")))
    config = AgentConfig(kind="python", python_style="tool", python_url=server.url, max_turns=3)
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
    session = open_session(tokenizer, Scripted(tokenizer, [call, "It is 42."]), chat_task(tokenizer), parser="hermes")
    episode = run(make_agent(agents_of(config)[0], must_score=False).run, chat_task(tokenizer), session)
    assert "<|im_start|>tool\n42<|im_end|>" in tokenizer.decode(episode.ledgers[0].ids)
    assert server.seen[0]["code"] == "print(6 * 7)" and episode.extra["agent/python_calls"] == 1


def test_certificates_are_read_once_for_all_calls(serve, monkeypatch):
    read, create = [], ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **words: read.append(words) or create(**words))
    certificates.cache_clear()
    server = serve(*[(200, ran("Finished", "4"))] * 3)
    for _ in range(3):
        run(RemotePython(server.url, 64).run_async, "print(4)", 7.0)
    assert len(read) == 1
